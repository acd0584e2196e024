# make quick: virtual environment, requirements, then PPO against VACO, seed by seed, under lag 0 and 15
# make test:  virtual environment, requirements, then the tests
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quick test lint

quick: .venv/installed
	$(BIN)/python -m benchmark run quick --out runs/quick

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, for instance: make $(MAKECMDGOALS) PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -r requirements.txt
	@touch $@
