#!/bin/bash
mv apple.txt pear.txt
