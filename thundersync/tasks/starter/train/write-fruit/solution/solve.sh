#!/bin/bash
echo "apple" > fruit.txt
