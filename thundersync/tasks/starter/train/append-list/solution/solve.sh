#!/bin/bash
echo "milk" >> list.txt
