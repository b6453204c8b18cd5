#!/bin/bash
mkdir -p home/docs
