#!/bin/bash
mkdir alpha beta
