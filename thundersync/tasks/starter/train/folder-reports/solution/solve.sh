#!/bin/bash
mkdir reports
