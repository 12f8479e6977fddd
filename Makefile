# Two commands do everything on a machine with Python 3.11+, pip and make:
#   make demo    set up, plan the paper's main case and compare it; then profile, plan and train on 4 CPU processes
#   make test    set up, then lint, types and tests
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# On all cores, which pip does not use; the models of transformers that nobody imports are left out.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/transformers/models/|/tests/|/torch/testing/|/wandb/|/pip/|/pandas/|/pyarrow/|/scipy/|/networkx/|/sympy/' .venv/lib
VENV := .venv/.made
PLANNER := .venv/.planner
RUNTIME := .venv/.runtime
DEV := .venv/.dev
DOCS := .venv/.docs

# Tests and demo start many processes, which would compile the same source again and again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test pytest test-all lint bench pictures docs clean

$(VENV): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	touch $@

$(PLANNER): $(VENV)
	$(INSTALL) --editable .
	touch $@

$(RUNTIME): $(VENV)
	$(INSTALL) --editable ".[torch]"
	$(COMPILE)
	touch $(PLANNER) $@

$(DEV): $(VENV)
	$(INSTALL) --editable ".[dev]"
	$(COMPILE)
	touch $(PLANNER) $(RUNTIME) $@

$(DOCS): $(VENV)
	$(INSTALL) --editable ".[docs]"
	touch $(PLANNER) $@

demo: $(RUNTIME)
	$(BIN)/galvatron plan bert-huge-32 --cluster titan-rtx-8 --memory 8GiB --output plan.json
	$(BIN)/galvatron explain plan.json
	$(BIN)/galvatron compare bert-huge-32 --cluster titan-rtx-8 --memory 8GiB,12GiB,16GiB,20GiB --paper
	rm -rf runs/demo
	$(BIN)/galvatron train examples/small-bert --devices 4 --batch 32 --data stories --tokenizer train --steps 60 \
	  --lr 2e-3 --save-every 20 --evaluate-every 20 --output runs/demo
	$(BIN)/galvatron export runs/demo runs/demo/model

# Checking types takes half a minute of one core, so tests run beside it; test-all checks those of the tests too.
test: $(DEV)
	$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: lint
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "slow or not slow"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

bench: $(DEV)
	$(BIN)/python benchmarks/search_speed.py
	$(BIN)/python benchmarks/search_hunt.py
	$(BIN)/python benchmarks/paper_table.py
	$(BIN)/python benchmarks/memory_table.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/prediction.py --devices 4
	$(BIN)/python benchmarks/prediction.py --devices 8

# Those of pages need a browser (chromium) too.
pictures: $(DEV)
	$(BIN)/python docs/pictures.py

# The pages of docs/ as a site in site/, to open without a server.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build site
