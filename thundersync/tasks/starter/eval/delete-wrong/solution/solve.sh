#!/bin/bash
rm wrong.txt
