#!/bin/bash
echo "cat" > pet.txt
