#!/bin/bash
mkdir backup
