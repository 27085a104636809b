# The front door: `make` lists the targets. Variables may be set on the command line, e.g. `make test WORKERS=1`.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread per process: on few cores more threads make a step slower, not faster. No hub: nothing is downloaded.
QUIET_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint tables bench bench-losses clean

help:
	@echo "make install       create $(VENV) and install grpo-ext with its development tools, at the pinned versions"
	@echo "make demo          train a tiny model on this machine (CPU, nothing to download) and report what it learned"
	@echo "make test          run the tests ($(WORKERS) processes; PYTEST_ARGS='-k name' passes options on)"
	@echo "make lint          ruff (rules and format) and mypy"
	@echo "make tables        rewrite the generated tables of README.md and docs/"
	@echo "make bench         time an optimizer step side by side with stock TRL"
	@echo "make bench-losses  train the quickstart task with every loss and write benchmarks/losses.md"
	@echo "make clean         remove caches and build products (not $(VENV), not outputs/)"

install: $(STAMP)

# torch goes in first and by itself, so that what depends on it takes the build chosen here (see README, Install).
$(STAMP): pyproject.toml constraints.txt
	@echo "install: $(VENV) with $(TORCH) and the pinned development environment"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	@touch $(STAMP)

demo: install
	@echo "demo: train the quickstart model and report what it learned"
	$(QUIET_ENV) $(BIN)/grpo-ext demo

test: install
	@echo "test: pytest in $(WORKERS) processes"
	$(QUIET_ENV) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: install
	@echo "lint: ruff check, ruff format --check, mypy"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

tables: install
	@echo "tables: rewrite the generated tables of README.md and docs/"
	$(BIN)/python docs/tables.py

bench: install
	@echo "bench: an optimizer step of grpo-ext and of stock TRL, side by side"
	$(QUIET_ENV) $(BIN)/python benchmarks/step_overhead.py
	$(QUIET_ENV) $(BIN)/python benchmarks/whole_step.py
	$(QUIET_ENV) $(BIN)/python benchmarks/reward_isolation.py
	$(QUIET_ENV) $(BIN)/python benchmarks/shared_prefix.py

bench-losses: install
	@echo "bench-losses: the quickstart task with every loss"
	$(QUIET_ENV) $(BIN)/python benchmarks/losses.py

clean:
	@echo "clean: remove caches and build products"
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
