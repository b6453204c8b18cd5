#!/bin/bash
mv lion.txt tiger.txt
