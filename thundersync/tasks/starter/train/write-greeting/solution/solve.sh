#!/bin/bash
echo "good morning" > greeting.txt
