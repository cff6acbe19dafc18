# The one door for people and CI. What running needs is installed into .venv from requirements.lock and torch.lock, and
# what tests and checks need beside it from dev.lock, when one of them is first made.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Processes that a test starts load what was compiled before them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train quick test older capped lint types docs site stale clean

# What depends on the processor's instructions: products and kernels, codecs, models, rows, exactness of whole jobs.
OLDER := tests/training tests/compression tests/models tests/embedding tests/job/test_exactness.py \
	tests/job/test_dead_units.py tests/job/test_without_fbgemm.py
# No role is a process, no browser, no network namespace.
QUICK := tests/house tests/aggregation tests/compression tests/recovery tests/sync tests/models tests/training \
	tests/metrics tests/job/test_exactness.py

train: $(STAMP)  ## Trains the demo and says where the report is.
	@$(BIN)/shadowsync train $(ARGS)

test: $(DEV)  ## Runs every test, in two processes that share them out until the end.
	@$(BIN)/pytest -n 2 --dist worksteal

quick: $(DEV)  ## Runs what answers within a minute, without starting processes.
	@$(BIN)/pytest -n 2 --dist worksteal $(QUICK)

older: $(DEV)  ## Trains, and tests what depends on the processor, as on one with AVX2 only and on one with SSE4.1 only.
	@ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(MAKE) --no-print-directory capped
	@ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default $(MAKE) --no-print-directory capped

capped: $(DEV)
	@$(BIN)/shadowsync train data.rows=50000 --out $$(mktemp -d)/run
	@$(BIN)/pytest -n 2 --dist worksteal $(OLDER)

lint: $(DEV)  ## Checks style and format.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(DEV)  ## Checks types.
	@$(BIN)/mypy

docs: $(STAMP)  ## Writes the configuration reference from the schema.
	@$(BIN)/python docs/make_configuration.py

site: $(DEV)  ## Builds the docs as a site in build/site; whatever is odd about it is an error.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site: build/site/index.html"

stale: $(DEV)  ## Lists the tables of docs/measurements.md whose code has changed since they were measured.
	@$(BIN)/python benchmarks/study.py stale

clean:  ## Removes the virtual environment and caches; keeps runs/.
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis

$(STAMP): requirements.lock torch.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned requirements into $(VENV) (once) ..."
	@$(PIP) --no-deps --require-hashes -r requirements.lock
	@$(PIP) -r torch.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

$(DEV): $(STAMP) dev.lock
	@echo "installing the pinned requirements of tests and checks into $(VENV) (once) ..."
	@$(PIP) --no-deps --require-hashes -r dev.lock
	@touch $(DEV)
