#!/bin/bash
mkdir tools
