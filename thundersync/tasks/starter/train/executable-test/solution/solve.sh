#!/bin/bash
chmod +x test.sh
