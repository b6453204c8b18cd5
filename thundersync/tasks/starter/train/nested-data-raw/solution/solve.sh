#!/bin/bash
mkdir -p data/raw
