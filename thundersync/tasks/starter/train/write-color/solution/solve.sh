#!/bin/bash
echo "green" > color.txt
