#!/bin/bash
echo "done" >> log.txt
