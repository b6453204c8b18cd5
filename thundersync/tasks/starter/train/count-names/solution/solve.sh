#!/bin/bash
wc -l < names.txt > count.txt
