#!/bin/bash
mv lake.txt river.txt
