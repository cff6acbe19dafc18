# The one door for people and CI. Everything is installed into .venv from requirements.lock and torch.lock.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test lint types docs clean

train: $(STAMP)  ## Trains the demo and says where the report is.
	@$(BIN)/shadowsync train $(ARGS)

test: $(STAMP)  ## Runs every test, in two processes that take a file at a time.
	@$(BIN)/pytest -n 2 --dist loadfile

lint: $(STAMP)  ## Checks style and format.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)  ## Checks types.
	@$(BIN)/mypy

docs: $(STAMP)  ## Writes the configuration reference from the schema.
	@$(BIN)/python docs/make_configuration.py

clean:  ## Removes the virtual environment and caches; keeps runs/.
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis

$(STAMP): requirements.lock torch.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned requirements into $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r torch.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(STAMP)
