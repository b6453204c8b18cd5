#!/bin/bash
mkdir garden
