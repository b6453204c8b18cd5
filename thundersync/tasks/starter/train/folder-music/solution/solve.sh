#!/bin/bash
mkdir music
