#!/bin/bash
cp poem.txt verse.txt
