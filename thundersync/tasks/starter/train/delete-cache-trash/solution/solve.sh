#!/bin/bash
rm cache.txt trash.txt
