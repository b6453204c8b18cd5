#!/bin/bash
touch todo.txt
