#!/bin/bash
wc -l < cities.txt > total.txt
