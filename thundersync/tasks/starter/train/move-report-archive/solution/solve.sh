#!/bin/bash
mv report.txt archive/
