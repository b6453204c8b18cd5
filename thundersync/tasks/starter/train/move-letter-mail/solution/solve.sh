#!/bin/bash
mv letter.txt mail/
