#!/bin/bash
echo "good morning" > greet.txt
