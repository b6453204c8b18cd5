#!/bin/bash
touch index.html
