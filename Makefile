# Two commands do everything on a machine with Python 3.11+, pip and make:
#   make demo    set up, then plan the paper's main case and explain the plan
#   make test    set up, then run lint, types and tests
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint bench setup clean
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/galvatron plan bert-huge-32 --cluster titan-rtx-8 --memory 8GiB --paper --output plan.json
	$(BIN)/galvatron explain plan.json

test: $(READY) lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/search_speed.py
	$(BIN)/python benchmarks/paper_table.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build
