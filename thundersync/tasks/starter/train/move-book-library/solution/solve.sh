#!/bin/bash
mv book.txt library/
