# Everything starts from a fresh clone with python3 and make; each target builds what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Compiled modules are kept for the processes that the tests start, and for the next run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env demo messages test test-fast test-faults test-differential lint types coverage docs test-oldest test-trainer clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	touch $(STAMP)

demo: env
	$(BIN)/python examples/demo.py

# After a sentence was added or changed: updates memfit.po and lists what has no Chinese yet.
messages: env
	$(BIN)/python scripts/messages.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

test: env
	$(BIN)/python -m pytest -n 2

test-fast: env
	$(BIN)/python -m pytest -n 2 tests/unit

# Kills, full disks, damaged checkpoints, memory that runs out, CPUs that trap, three hundred wrong
# inputs.
test-faults: env
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/faults

# Random trainings by the stock Trainer and by BudgetTrainer, which must not differ. Each case that
# does is printed as a script. CI runs the first 300.
N     ?= 5000
FIRST ?= 0
test-differential: env
	DIFFERENTIAL_CASES=$(N) DIFFERENTIAL_FIRST=$(FIRST) \
	$(BIN)/python -m pytest -n 2 --dist worksteal -q tests/differential

coverage: env
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term-missing:skip-covered --cov-fail-under=90

# Into build/docs, with every warning an error; the strategies' pages are written from their classes.
docs: env
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs
	@echo build/docs/index.html

# The oldest transformers, accelerate and datasets that pyproject.toml allows, in an environment of
# its own. torch stays at the version of constraints.txt: its other builds are gigabytes with CUDA.
# The oldest torch, 2.11, is what the GPU tests (tests/gpu) and benchmarks/results were run with.
# datasets 4 leaves the files it has read to the garbage collector.
OLDEST := .venv-oldest
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n 2 -W "ignore:unclosed file:ResourceWarning" tests/unit

$(OLDEST)/.installed: pyproject.toml constraints.txt tests/oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check torch -c tests/oldest.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c tests/oldest.txt
	touch $@

# transformers' own Trainer tests on BudgetTrainer, which are not part of this project:
# make test-trainer TESTS=a folder with them and a script `run PYTHON`. docs/differences.md lists
# what differs on purpose. What only these tests need lies in an environment that adds to .venv's.
TRAINER := .venv-trainer
test-trainer: $(TRAINER)/.installed
	@test -x "$(TESTS)/run" || { echo "make test-trainer TESTS=a folder with the tests and run"; exit 2; }
	$(TRAINER)/bin/python tests/trainer_tests.py "$(TESTS)"

$(TRAINER)/.installed: $(STAMP)
	$(BIN)/python -m venv $(TRAINER)
	$(BIN)/python -c "import sysconfig as s; f = 'import site; site.addsitedir({!r})\n'; print(f.format(s.get_path('purelib')))" > "$$($(TRAINER)/bin/python -c "import sysconfig as s; print(s.get_path('purelib'))")/beside.pth"
	$(TRAINER)/bin/python -m pip install --quiet --disable-pip-version-check parameterized pytest-timeout optuna
	$(TRAINER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps bitsandbytes schedulefree galore-torch apollo-torch lomo-optim grokadamw torch-optimi evaluate
	touch $@

clean:
	rm -rf $(VENV) $(TRAINER) $(OLDEST) .cache build dist demo-run
