# make run   trains the example on two ranks;   make test   lint, types, tests;   make help   the rest
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test lint types unit benchmark sanitize conformance clean

help:  ## Say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

run: $(VENV)/.installed  ## Train the example on $(RANKS) ranks (RANKS=4, ARGS="--epochs 1")
	@$(BIN)/phalanx run --no-prefix -n $(RANKS) examples/text_classification.py $(ARGS)

test: lint types unit  ## Everything continuous integration checks

lint: $(VENV)/.installed  ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed  ## Static types
	$(BIN)/mypy

unit: $(VENV)/.installed  ## Tests (ARGS="-k launch")
	$(BIN)/python -m pytest $(ARGS)

benchmark: $(VENV)/.installed  ## The figures of docs/benchmarks.md, measured here
	$(BIN)/phalanx bench all --against gloo --patience 120
	$(BIN)/phalanx bench all_reduce --dtypes float16,bfloat16 --against gloo --patience 30
	$(BIN)/python benchmarks/start_ranks.py
	$(BIN)/python benchmarks/ddp_step.py
	$(BIN)/python benchmarks/training.py

sanitize: $(VENV)/.installed  ## The C core under sanitizers, ten times longer than in the tests
	PHALANX_STRESS_SCALE=10 $(BIN)/python -m pytest tests/unit/test_sanitizers.py

conformance: $(VENV)/.installed  ## torch's own distributed suite on the backend (some minutes; docs/conformance.md)
	$(BIN)/python -m tests.conformance.torch_suite --ranks 3
	$(BIN)/python -m tests.conformance.torch_suite --ranks 3 --under mpi
	$(BIN)/python -m tests.conformance.torch_suite --ranks 2 --under gloo

clean:  ## Remove what the build made (not the environment)
	rm -rf build dist src/*.egg-info src/phalanx/native/*.so .mypy_cache .pytest_cache .ruff_cache

# Two stamps: the environment when the requirements change, the package when its C or its metadata does.
$(VENV)/.requirements: requirements/development.txt requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Phalanx needs Python 3.10 or newer; choose one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing the development requirements into $(VENV) (once; a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/development.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.requirements pyproject.toml setup.py $(wildcard src/phalanx/native/csrc/*)
	@command -v $${CC:-cc} >/dev/null || { echo "No C compiler. On Debian and Ubuntu: apt-get install gcc libc6-dev" >&2; exit 1; }
	@echo "Building Phalanx and its C core"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
