#!/bin/bash
mkdir cats dogs
