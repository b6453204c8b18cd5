#!/bin/bash
cp song.txt tune.txt
