#!/bin/bash
grep error app.txt > bad.txt
