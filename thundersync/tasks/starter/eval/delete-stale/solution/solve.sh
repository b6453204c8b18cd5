#!/bin/bash
rm stale.log
