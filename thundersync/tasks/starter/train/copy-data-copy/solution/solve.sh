#!/bin/bash
cp data.txt copy.txt
