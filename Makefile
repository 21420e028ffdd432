# `make demo` and `make test` are complete on a fresh machine with Python 3.12: they install what they need first.
SHELL := /bin/bash
PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
# One thread per process: tests and demo run several ranks on few cores.
# Test processes side by side; a test may start up to four ranks of its own.
WORKERS ?= 2
RUN := OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1

.PHONY: help install demo test test-all lint type configs-check doctor
help:
	@echo "make demo           prepare real clips, train dense to sparse, resume, sample (CPU, minutes)"
	@echo "make test           all tests that need no GPU"
	@echo "make test-all       the slow ones, too"
	@echo "make lint type configs-check"
	@echo "make doctor         what is installed and what runs where"

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints/ci.txt
	@command -v $(PYTHON) >/dev/null 2>&1 && $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || \
	  { echo "make: Python 3.12 is required and '$(PYTHON)' is not it: install Python 3.12 or run make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "make: installing into $(VENV); PyTorch and CUDA's libraries are several GB, which takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo,dev,vae,wandb]' -c constraints/ci.txt
	@touch $@

demo: $(STAMP)
	$(RUN) $(BIN)/python scripts/demo.py

# A GPU is hidden, so that the tests are the same ones everywhere.
test: $(STAMP)
	CUDA_VISIBLE_DEVICES= $(RUN) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not gpu and not multigpu and not slow"

test-all: $(STAMP)
	CUDA_VISIBLE_DEVICES= $(RUN) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not gpu and not multigpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

type: $(STAMP)
	$(BIN)/mypy

configs-check: $(STAMP)
	$(RUN) $(BIN)/dsv configs-check

doctor: $(STAMP)
	$(RUN) $(BIN)/dsv doctor
