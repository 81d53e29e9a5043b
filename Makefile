# `make check` is what CI does. The tools come from $(VENV): the active environment, or .venv from `make venv`.

VENV ?= $(or $(VIRTUAL_ENV),.venv)
PYTHON ?= python3
JOBS ?= auto
PYTEST := $(VENV)/bin/pytest

.DEFAULT_GOAL := check
.NOTPARALLEL:
.PHONY: check static lint format types layers serial tests nightly fix venv clean

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

# Tests that measure time run alone; only their files are collected. pytest answers 5 if there are none, which is no
# failure.
serial:
	$(PYTEST) -m "serial and not nightly" $$(grep -rl --include='test_*.py' 'mark\.serial' tests) || test $$? -eq 5

# As many at a time as there are cores, so each has one thread: with more, torch's threads wait for each other.
tests: export OMP_NUM_THREADS := 1
tests:
	$(PYTEST) -m "not serial and not nightly" -n $(JOBS) --dist loadgroup --durations 20

# Long fault runs, limits on time and learning runs, and twenty times as many examples of hypothesis: hours, not minutes.
nightly:
	HYPOTHESIS_PROFILE=long $(PYTEST) -m "nightly or hypothesis"

fix:
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

venv:
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q --upgrade pip
	.venv/bin/python -m pip install -q -e '.[dev]'

clean:
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
