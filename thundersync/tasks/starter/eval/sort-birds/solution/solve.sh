#!/bin/bash
sort birds.txt > order.txt
