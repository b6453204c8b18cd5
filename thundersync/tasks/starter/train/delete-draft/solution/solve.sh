#!/bin/bash
rm draft.txt
