#!/bin/bash
rm x.txt y.txt
