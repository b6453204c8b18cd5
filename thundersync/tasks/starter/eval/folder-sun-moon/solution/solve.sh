#!/bin/bash
mkdir sun moon
