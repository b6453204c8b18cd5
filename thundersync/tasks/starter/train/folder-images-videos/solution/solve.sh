#!/bin/bash
mkdir images videos
