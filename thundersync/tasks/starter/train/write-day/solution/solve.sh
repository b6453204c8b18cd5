#!/bin/bash
echo "monday" > day.txt
