#!/bin/bash
echo "horse" > animal.txt
