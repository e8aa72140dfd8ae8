# Everything starts from a fresh clone with python3 and make; each target builds what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: env demo test test-fast test-faults lint types coverage clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	touch $(STAMP)

demo: env
	$(BIN)/python examples/demo.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

test: env
	$(BIN)/python -m pytest -n 2

test-fast: env
	$(BIN)/python -m pytest -n 2 tests/unit

# Kills, full disks, damaged checkpoints, memory that runs out, three hundred wrong inputs.
test-faults: env
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/faults

coverage: env
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term-missing:skip-covered --cov-fail-under=90

clean:
	rm -rf $(VENV) .cache build dist demo-run
