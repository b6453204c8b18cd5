#!/bin/bash
rm temp.log
