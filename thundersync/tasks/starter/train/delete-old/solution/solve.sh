#!/bin/bash
rm old.txt
