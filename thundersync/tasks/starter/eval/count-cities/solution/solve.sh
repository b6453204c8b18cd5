#!/bin/bash
wc -l < cities.txt > number.txt
