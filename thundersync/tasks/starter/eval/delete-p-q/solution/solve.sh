#!/bin/bash
rm p.txt q.txt
