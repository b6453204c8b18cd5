#!/bin/bash
wc -l < rows.txt > total.txt
