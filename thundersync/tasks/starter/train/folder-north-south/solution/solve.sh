#!/bin/bash
mkdir north south
