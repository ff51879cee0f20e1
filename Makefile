# Two commands do all the set-up: `make demo` (core only) and `make test` (everything).
# PIP_ARGS is handed to pip, for example to choose a smaller torch build.
PYTHON ?= python3
PIP_ARGS ?=
BIN = .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
# Tests use small matrices, on which threads only get into each other's way.
TEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SOURCES = pyproject.toml constraints.txt

.PHONY: demo test test-slow check clean

demo: .venv/core
	$(BIN)/moescope demo

test: .venv/everything check
	$(TEST) -m "not slow"

test-slow: .venv/everything
	$(TEST) -m slow

check: .venv/everything
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/core: .venv/bin/python $(SOURCES)
	$(INSTALL) --editable .
	@touch $@

.venv/everything: .venv/bin/python $(SOURCES)
	$(INSTALL) --editable ".[hf,export,ray,dev]"
	@touch $@ .venv/core

clean:
	rm -rf .venv runs
