#!/bin/bash
echo "yes" > first.txt
echo "no" > second.txt
