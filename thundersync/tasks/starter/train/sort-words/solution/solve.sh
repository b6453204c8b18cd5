#!/bin/bash
sort words.txt > sorted.txt
