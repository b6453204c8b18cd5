#!/bin/bash
mkdir red blue
