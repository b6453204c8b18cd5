#!/bin/bash
cp book.txt novel.txt
