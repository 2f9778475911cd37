# make demo: the main job, from nothing.   make test: all that CI runs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick test-all bench clean
.DELETE_ON_ERROR:

demo: .stamps/lab
	$(BIN)/coresieve demo

test: .stamps/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -n 2 -m "not slow"

quick: .stamps/dev
	$(BIN)/python -m pytest -n 2 -m "not slow and not cluster"

test-all: .stamps/dev
	$(BIN)/python -m pytest -n 2

bench: .stamps/dev
	$(BIN)/python -m benchmarks

.stamps/venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "coresieve needs Python 3.11 or later; try make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	@mkdir -p .stamps && touch $@

.stamps/lab: .stamps/venv pyproject.toml constraints.txt
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q --disable-pip-version-check -e '.[lab]'
	@touch $@

.stamps/dev: .stamps/venv pyproject.toml constraints.txt
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q --disable-pip-version-check -e '.[lab,onnx,dev]'
	@touch $@

clean:
	rm -rf .venv .stamps out
