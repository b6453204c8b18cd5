#!/bin/bash
mkdir kitchen
