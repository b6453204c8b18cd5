#!/bin/bash
grep error app.log > bad.log
