# Each target also works without make; the plain commands are what the recipes show.
PYTHON ?= python3
PY := .venv/bin/python

# The tests start dozens of processes: none of them should compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint

help:
	@echo "make setup       make .venv with everything thundersync needs"
	@echo "make quickstart  setup, then train a small agent on this machine (configs/quickstart.toml)"
	@echo "make test        setup with the tests' own needs, then all tests but the slow and the GPU ones"
	@echo "make lint        ruff and mypy"

setup:
	$(PYTHON) tools/setup.py

quickstart: setup
	$(PY) -m thundersync run configs/quickstart.toml

test:
	$(PYTHON) tools/setup.py --tests
	$(PY) -m pytest -n 3 --dist loadgroup --no-loadscope-reorder

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
