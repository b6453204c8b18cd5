#!/bin/bash
echo "salt" >> shop.txt
