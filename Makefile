# `make check` is what CI does. The tools come from $(VENV): the active environment, or .venv from `make venv`.

VENV ?= $(or $(VIRTUAL_ENV),.venv)
PYTHON ?= python3
JOBS ?= auto
PYTEST := $(VENV)/bin/pytest
AGAIN := $(VENV)/bin/python -m tests.again

.DEFAULT_GOAL := check
.NOTPARALLEL:
.PHONY: check static lint format types layers serial tests long fix venv clean

# `tests` stands last, so that its summary is the last line on the screen.
check: static serial tests

static: lint format types layers

lint:
	$(VENV)/bin/ruff check .

format:
	$(VENV)/bin/ruff format --check .

types:
	$(VENV)/bin/mypy

layers:
	$(VENV)/bin/lint-imports

# Many tests time and kill real processes, and a busy machine can fail one: what failed is tried once more, alone.
# What passes then stays on the screen as FAILED of the first try, and is a defect to be mended.

# Tests that measure time run alone. pytest answers 5 if there are none, which is no failure.
serial:
	$(PYTEST) -m "serial and not slow" || test $$? -eq 5 || $(AGAIN)

# As many at a time as there are cores, so each has one thread: with more, torch's threads wait for each other.
tests: export OMP_NUM_THREADS := 1
tests:
	$(PYTEST) -m "not serial and not slow" -n $(JOBS) --dist loadgroup --durations 20 || $(AGAIN)

# Long studies: hours, not minutes.
long:
	$(PYTEST) -m slow

fix:
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

venv:
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q --upgrade pip
	.venv/bin/python -m pip install -q -e '.[dev]'

clean:
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
