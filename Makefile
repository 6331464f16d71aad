# Everything a person does here. `make` alone lists it; `make demo` and `make test` set up what they need.
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
BIN := .venv/bin
READY := .venv/.ready
PYTEST := $(BIN)/pytest --no-header
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# One more than there are cores: tests of workers wait for brokers and processes a good part of their time.
WORKERS ?= $(shell echo $$(( $(CORES) < 5 ? $(CORES) + 1 : 6 )))
# A file stays in one process, so that what its tests share is made once; long files begin first.
SIDE_BY_SIDE := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit check bench bench-dispatch faults faults-long lock reference clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything that is pinned in requirements.lock (about 3 GB to download on Linux)

$(READY): requirements.lock pyproject.toml tools/setup
	@tools/setup

demo: setup ## start a real Kafka and a worker, classify photos, print each answer and a summary
	@$(BIN)/forebay demo

test: setup ## run every test that this machine can run, in a few processes that each start a Kafka; WORKERS=1 takes one
	@$(PYTEST) $(SIDE_BY_SIDE) -m "not long"

check: setup ## ruff, mypy and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: setup ## measure throughput and latency against bare loops on this machine
	@$(BIN)/python bench/throughput.py
	@$(BIN)/python bench/latency.py

bench-dispatch: setup ## measure static, linger and eager over a range of loads (2 minutes); draws docs/images/dispatch.png
	@$(BIN)/python bench/dispatch.py --plot docs/images/dispatch.png

test-unit: setup ## the unit tests alone, in seconds: no Kafka, no torch, no process
	@$(PYTEST) --numprocesses $$(( $(CORES) < 4 ? $(CORES) : 4 )) --dist worksteal tests/unit

faults: setup ## the fault tests that are part of `make test`: pytest -m "not long" tests/faults
	@$(PYTEST) $(SIDE_BY_SIDE) -m "not long" tests/faults

faults-long: setup ## the tests that take minutes and `make test` leaves out; FAULT_SEED=n repeats a run's random choices
	@seed=$${FAULT_SEED:-$$RANDOM$$RANDOM}; echo "FAULT_SEED=$$seed make faults-long repeats this run"; \
	  FAULT_SEED=$$seed $(PYTEST) -m long

reference: setup ## write the generated pages of docs/reference again
	@$(BIN)/python tools/settings_reference.py
	@$(BIN)/python tools/commands_reference.py
	@$(BIN)/python tools/metrics_reference.py

lock: setup ## pin what pyproject.toml asks for in requirements.lock; UPGRADE=1 takes the newest of everything
	@$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
	  --no-header --no-annotate --quiet $(if $(UPGRADE),--upgrade) --output-file requirements.lock
	@echo "requirements.lock: $$(grep -c '==' requirements.lock) packages pinned; now: make setup test"

clean: ## remove what was built and every cache, .venv included
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
