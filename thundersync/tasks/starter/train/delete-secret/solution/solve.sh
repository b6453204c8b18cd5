#!/bin/bash
rm secret.txt
