#!/bin/bash
echo "done" > status.txt
