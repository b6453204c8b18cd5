#!/bin/bash
mv bread.txt kitchen/
