#!/bin/bash
touch one.txt two.txt
