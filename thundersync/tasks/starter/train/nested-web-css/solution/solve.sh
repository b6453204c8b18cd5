#!/bin/bash
mkdir -p web/css
