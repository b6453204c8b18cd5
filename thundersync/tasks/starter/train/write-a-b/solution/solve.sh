#!/bin/bash
echo "cat" > a.txt
echo "dog" > b.txt
