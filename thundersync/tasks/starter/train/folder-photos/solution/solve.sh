#!/bin/bash
mkdir photos
