#!/bin/bash
rm trash.txt
