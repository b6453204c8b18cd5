#!/bin/bash
mv song.txt music/
