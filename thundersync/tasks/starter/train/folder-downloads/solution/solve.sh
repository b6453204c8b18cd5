#!/bin/bash
mkdir downloads
