#!/bin/bash
echo "tea" > left.txt
echo "milk" > right.txt
