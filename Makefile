# `make quickstart` and `make test` do everything on a fresh machine with Python 3.11, git, make and a C++ compiler.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
QUICK := .cache/quickstart

# The pinned list is chosen by whether an NVIDIA GPU is there: `make setup DEVICE=cpu` decides by hand.
DEVICE ?= $(shell if nvidia-smi >/dev/null 2>&1 || [ -e /dev/nvidia0 ]; then echo cuda; else echo cpu; fi)
LISTS := requirements/$(DEVICE).txt requirements/dev.txt requirements/quickstart.txt
# The stamp's name holds a hash of what was installed: other lists, another stamp, a new installation.
STAMP := $(VENV)/.installed-$(DEVICE)-$(shell cat $(LISTS) setup.py | sha256sum | cut -c1-16)

# The extension is built in place, once more when a source of it changes.
EXT := megarl/_C.abi3.so
EXT_SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu csrc/*/*.cuh)

.PHONY: help setup quickstart test test-long test-fast test-slurm chaos bench check format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

setup: $(STAMP) $(EXT) ## .venv with the pinned packages, megarl and its extension; nothing the second time

# The stamp is written last: an installation that was broken off is taken up again.
$(STAMP): $(LISTS) setup.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or run: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "$(PYTHON) is not Python 3.11, which the pinned lists are for"; exit 2; }
	@echo "setup: device $(DEVICE): installing the packages of $(LISTS) (about a minute)"
	@rm -f $(VENV)/.installed-*
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps $(addprefix -r ,$(LISTS))
	@MEGARL_NO_EXTENSION=1 $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps --no-build-isolation -e .
	@touch $@

$(EXT): $(EXT_SOURCES) setup.py | $(STAMP)
	@echo "setup: building megarl._C (about half a minute)"
	@mkdir -p build
	@$(BIN)/python setup.py -q build_ext --inplace >build/extension.log 2>&1 || { cat build/extension.log; exit 1; }
	@touch $@

# `model` and `data` are each written beside and renamed, so a folder that is there is whole.
$(QUICK)/model/config.json: | $(STAMP)
	@mkdir -p $(QUICK)
	$(BIN)/python examples/quickstart/prepare_model.py --out $(QUICK)/model

$(QUICK)/data/val.parquet: | $(STAMP)
	@mkdir -p $(QUICK)
	@rm -rf $(QUICK)/data $(QUICK)/data.writing
	$(BIN)/python -W ignore::SyntaxWarning examples/data/reasoning_gym_chain_sum.py --out $(QUICK)/data.writing --train 2000 --val 100 --digits 1 --terms 2 --seed 1
	@mv $(QUICK)/data.writing $(QUICK)/data

quickstart: $(STAMP) $(EXT) $(QUICK)/model/config.json $(QUICK)/data/val.parquet ## PPO of SmolLM2-135M on one-digit sums, everything included
	$(BIN)/megarl train --config examples/ppo_smollm2/config.yaml $(ARGS)

check: $(STAMP) ## formatter, linter, types, house rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/python -m pytest -q tests/unit/test_house.py

test: check $(EXT) $(QUICK)/model/config.json $(QUICK)/data/val.parquet ## everything but `test-long` and `test-slurm`
	$(BIN)/python -m pytest --durations=20 -m "not long" $(ARGS)

test-long: $(STAMP) $(EXT) $(QUICK)/model/config.json $(QUICK)/data/val.parquet ## whole runs of minutes: faults, resumes, eight ranks
	$(BIN)/python -m pytest --durations=20 -m long $(ARGS)

# As root. Gets Debian's slurm-wlm and munge where they are missing. What this machine cannot run fails, or is skipped with
# the reason with MEGARL_CLUSTER_TESTS=if-possible.
test-slurm: $(STAMP) $(EXT) ## a real Slurm of this one machine, and two hosts as network namespaces
	MEGARL_CLUSTER_TESTS=$${MEGARL_CLUSTER_TESTS:-1} $(BIN)/python -m pytest --durations=5 tests/cluster $(ARGS)

test-fast: $(STAMP) $(EXT) ## the tests of single parts, without the slow ones
	$(BIN)/python -m pytest -q -m "not slow" tests/unit $(ARGS)

chaos: $(STAMP) $(EXT) ## kill a random rank 20 times, resume, compare with the undisturbed run (20 minutes)
	$(BIN)/python -m tests.chaos.kill --times 20 --seed 1 $(ARGS)

# One benchmark, or all: a benchmark is a file of benchmarks/ that can be run.
NAME ?= $(filter-out measure,$(basename $(notdir $(wildcard benchmarks/*.py))))
bench: $(STAMP) $(EXT) ## benchmarks of the kernels, or `make bench NAME=logprob`; figures also in benchmarks/out
	@for name in $(NAME); do $(BIN)/python -W ignore -m benchmarks.$$name $(ARGS); done

format: $(STAMP) ## rewrite the files as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what runs and builds left, but not .venv or .cache
	rm -rf runs build $(EXT) benchmarks/out *.egg-info .pytest_cache .ruff_cache .hypothesis
