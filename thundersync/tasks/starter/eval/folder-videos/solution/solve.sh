#!/bin/bash
mkdir videos
