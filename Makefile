# Commands, each of which does all the set-up on a fresh machine:
#   make demo    see it work
#   make test    lint, types, doctests and tests
#   make check   the quick loop: lint, types, and the tests of the core, in about a minute and a half

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
TESTS := $(VENV)/.tests

# Tests without training, for the quick loop.
QUICK := src/fmicl/config src/fmicl/divergences src/fmicl/losses src/fmicl/methods src/fmicl/theory src/fmicl/utils \
	tests/divergences tests/information tests/methods/test_methods.py tests/theory tests/losses/test_losses.py \
	tests/losses/test_objectives_registry.py tests/config/test_recipes.py tests/config/test_settings.py \
	tests/sweep/test_grid.py tests/sweep/test_summary.py tests/utils/test_files.py tests/utils/test_options.py \
	tests/utils/test_registry.py tests/utils/test_seeding.py

.PHONY: demo test check lint clean

$(RUNS): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fmicl needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "could not make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing torch and what training needs into $(VENV): some minutes, the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train]'
	@touch $@

$(TESTS): $(RUNS)
	@echo "installing what the tests need into $(VENV)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(RUNS)
	$(BIN)/fmicl train digits

lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

check: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -q $(QUICK)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
