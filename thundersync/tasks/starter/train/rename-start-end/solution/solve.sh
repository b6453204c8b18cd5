#!/bin/bash
mv start.txt end.txt
