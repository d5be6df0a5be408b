# Needs only make and a Python >= 3.11. Every target runs in its own virtual environment, made with uv where it is
# installed and with venv + pip otherwise, and remade only when pyproject.toml changes.
#
#   make demo        train a small GPT and a small Llama on 8 virtual devices, with their plans, and serve them
#   make test        all but the slow tests: minutes
#   make test-all    also the slow ones, and those that need a GPU where one is present
#   make check       format, lint, types, import contract, and the tests that take no seconds, until the first failure:
#                    under 2 minutes on 2 cores
#   make bench       planner speed and step time
#   make docs        the manual as HTML under docs/_build
#
# Another interpreter: make PYTHON=/path/to/python3.12 VENV=.venv312 test

VENV ?= .venv
# One more than the cores of a small machine: one worker in three waits for processes of Ray.
JOBS ?= 3
# The first interpreter that starts and is new enough; pyenv leaves commands on the PATH that do not start.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
# Else every process that the tests start compiles our sources again.
unexport PYTHONDONTWRITEBYTECODE
UV := $(shell command -v uv 2>/dev/null)
BIN := $(VENV)/bin
# Files in order: the last ones are many short tests, so that no worker waits long for the other.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# What `make test` selects (pyproject.toml), less the tests that take seconds each.
QUICK := not medium and not slow and not ray and not gpu

ifdef UV
MAKE_VENV = $(UV) venv --quiet --allow-existing --python "$(PYTHON)" $(VENV)
INSTALL = $(UV) pip install --quiet --python $(BIN)/python
else
MAKE_VENV = "$(PYTHON)" -m venv $(VENV)
# As uv does: compiling all that is installed takes half a minute more than compiling what is then imported.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench docs clean

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; name one: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(MAKE_VENV)
	$(INSTALL) -e ".[dev,examples,plots,ray,checkpoint,serve,load]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) -e ".[docs]"
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.installed
	$(PYTEST) -m "" $(ARGS)

check: JOBS = 2
check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports
	$(PYTEST) -x -m "$(QUICK)" $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/bench.py $(ARGS)

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) docs/_build
