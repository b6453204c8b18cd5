#!/bin/bash
rm a.log b.log
