#!/bin/bash
mv ticket.txt travel/
