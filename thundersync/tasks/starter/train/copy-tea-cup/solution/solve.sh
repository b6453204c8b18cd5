#!/bin/bash
cp tea.txt cup.txt
