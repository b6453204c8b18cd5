#!/bin/bash
touch plan.txt
