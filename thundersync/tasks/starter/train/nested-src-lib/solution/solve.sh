#!/bin/bash
mkdir -p src/lib
