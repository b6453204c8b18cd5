#!/bin/bash
touch blank.txt
