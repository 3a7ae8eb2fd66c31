# Every target sets up what it needs by itself.
#   make PYTHON=python3.12     another Python for the virtual environment
#   make test VENV=/some/dir   another place for it
#   make test ARGS="-k gpipe"  arguments for pytest

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready

# pyright asks the registry at each start whether a newer version exists, unless told not to.
export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1

.PHONY: demo test check sweep clean

demo: $(READY)
	$(BIN)/stretto train examples/shakespeare.toml

test: check
	$(BIN)/python -m pytest $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The long sweeps have an hour each, instead of the limits of pyproject.toml.
sweep: $(READY)
	$(BIN)/python -m pytest -m sweep -o timeout=3600 -o faulthandler_timeout=4000 $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("stretto needs Python 3.10 or newer; name one: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --requirement requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@
