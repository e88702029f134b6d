# `make` lists the targets. Everything lives in .venv, made on first use.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help quickstart dev test lint format types clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

quickstart: .venv/installed ## Set up and train the quickstart into runs/quickstart
	$(BIN)/grpox train quickstart

dev: .venv/installed-dev ## Add to .venv what tests and benchmarks need

test: .venv/installed-dev ## Set up and pass the tests
	$(BIN)/python -m pytest

lint: .venv/installed-dev ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/installed-dev ## Mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/installed-dev ## Check types
	$(BIN)/mypy

clean: ## Remove the environment and caches; runs stay
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "grpox needs Python 3.11 or later"'
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python $(SOURCES)
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@
