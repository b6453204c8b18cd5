#!/bin/bash
rm junk.txt
