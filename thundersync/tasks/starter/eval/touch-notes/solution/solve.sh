#!/bin/bash
touch notes.txt
