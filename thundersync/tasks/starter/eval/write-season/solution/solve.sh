#!/bin/bash
echo "winter" > season.txt
