#!/bin/bash
touch lock.txt
