#!/bin/bash
mkdir -p city/park
