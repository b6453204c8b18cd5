#!/bin/bash
mv photo.txt album/
