#!/bin/bash
mv wolf.txt bear.txt
