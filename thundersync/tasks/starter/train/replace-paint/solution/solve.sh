#!/bin/bash
sed -i 's/red/blue/g' paint.txt
