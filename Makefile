# `make check` is what CI does. The tools come from $(VENV): the active environment, or .venv from `make venv`.

VENV ?= $(or $(VIRTUAL_ENV),.venv)
PYTHON ?= python3
# Tests at a time: three for two cores, since tests wait for a third of their time (for processes, clocks and disks).
JOBS ?= $(shell echo $$(( ($$(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2 )))
PYTEST := $(VENV)/bin/pytest

.DEFAULT_GOAL := check
.NOTPARALLEL:
.PHONY: check static lint format types layers serial tests nightly coverage docs release fix lock venv clean

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

# Each has one thread: with more, torch's threads wait for each other.
tests: export OMP_NUM_THREADS := 1
tests:
	$(PYTEST) -m "not serial and not nightly" -n $(JOBS) --dist loadgroup --durations 20

# Long fault runs, limits on time and learning runs, and twenty times as many examples of hypothesis: hours, not minutes.
# What measures time runs first and alone; the rest runs even if that fails.
nightly: export OMP_NUM_THREADS := 1
nightly: export HYPOTHESIS_PROFILE := long
nightly:
	failed=0; \
	$(PYTEST) -m "nightly and serial" --durations 20 || failed=1; \
	$(PYTEST) -m "(nightly or hypothesis) and not serial" -n $(JOBS) --dist loadgroup --durations 40 || failed=1; \
	exit $$failed

# What the unit tests of the data plane run of it; fails below `fail_under` in pyproject.toml. Minutes, so not in `check`.
COVERED := core durable web replay service formats
coverage:
	$(VENV)/bin/coverage run -m pytest -q $(addprefix tests/unit/,$(COVERED))
	$(VENV)/bin/coverage report --skip-covered

# The site of the docs in site/, strict about links.
docs:
	$(VENV)/bin/zensical build --strict

# Builds dist/, checks it, and tries the wheel with every Python from 3.11 to 3.14 that is here. Uploads nothing. TORCH is what
# pip installs as torch: `make release TORCH='torch --index-url https://download.pytorch.org/whl/cpu'`, or `TORCH=none`.
# REHEARSAL=1 accepts a changelog that begins with [Unreleased]; TAG is the tag, where it was made already.
TORCH ?= torch
release:
	$(VENV)/bin/python -m tests.release --torch '$(TORCH)' $(if $(PYTHONS),--pythons $(PYTHONS)) \
		$(if $(REHEARSAL),--rehearsal) $(if $(TAG),--tag $(TAG))

fix:
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

venv:
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q --upgrade pip
	.venv/bin/python -m pip install -q -c constraints.txt -e '.[dev]'

# Resolves all extras for every supported Python at once. Versions that still fit stay as they are; `make lock UPGRADE=1`
# takes the newest.
lock:
	$(VENV)/bin/python -m pip install -q uv
	$(VENV)/bin/uv pip compile -q --universal --python-version 3.11 --all-extras --annotation-style line \
		--custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade) pyproject.toml -o constraints.txt

clean:
	rm -rf build dist site htmlcov .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
