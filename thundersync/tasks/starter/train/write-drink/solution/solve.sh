#!/bin/bash
echo "coffee" > drink.txt
