# Two commands do all the set-up: `make demo` (core only) and `make test` (everything).
# PIP_ARGS is handed to pip, for example to choose a smaller torch build.
PYTHON ?= python3
PIP_ARGS ?=
BIN = .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
# Tests use small matrices, on which threads only get into each other's way; two processes share the files of tests instead.
WORKERS ?= 2
TEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SOURCES = pyproject.toml constraints.txt

.PHONY: study-smoke studies-report studies-test dist docs docs-pictures demo demo-model test test-all fast-tests \
	all-tests torture test-gpu fuzz check equal \
	bench bench-growth bench-memory bench-gpu bench-report bench-peer bench-commands bench-deploy bench-trace \
	bench-monitor bench-intervene bench-streamed bench-lab clean

demo: .venv/core
	$(BIN)/moescope demo

# Trains the model that the demo shows anew, by src/moescope/demo/shipped/recipe.toml: minutes on one core.
# One thread: the same numbers on a machine with more cores.
demo-model: .venv/core
	OMP_NUM_THREADS=1 $(BIN)/python -m moescope.demo.recipe

# What every change must pass: about six minutes on two cores, the checks of style and types beside the tests.
test: .venv/everything
	$(MAKE) --jobs 2 --no-print-directory check fast-tests

# Every test but those that need a GPU: about half an hour on two cores.
test-all: .venv/everything
	$(MAKE) --jobs 2 --no-print-directory check all-tests

fast-tests:
	$(TEST) -m "not slow"

all-tests:
	$(TEST)

# Runs killed at every write of joining and clearing, and 10,000 damaged inputs; test-all does a part of both.
torture: .venv/everything
	$(TEST) tests/faults --torture

# What needs a CUDA device; every other run leaves it out. Installs nothing: PYTHON needs torch, transformers, pandas,
# pyarrow, scipy, safetensors, typer, rich, filelock and pytest. Its versions may warn, so warnings are no errors here.
GPU_TESTS = $(shell grep -rl "pytest.mark.gpu" tests --include "test_*.py")
test-gpu:
	PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(PYTHON) -m pytest -o addopts= --import-mode=importlib -W default -m gpu $(GPU_TESTS)

# Damaged and hostile input of every kind: `make fuzz SEED=1 N=50000`, about 15 cases per second.
SEED ?= 0
N ?= 5000
fuzz: .venv/everything
	PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(BIN)/python -m faults.fuzz --seed $(SEED) -n $(N)

check: .venv/everything
	$(BIN)/ruff check src tests bench docs examples
	$(BIN)/ruff format --check src tests bench docs examples
	$(BIN)/mypy

# Whether this tree computes and shows the same numbers as an older commit: about ten minutes on two cores, and as long
# again the first time. `make equal ONLY="trace deploy"` takes some verbs.
BASE ?= d130f29
ONLY ?=
equal: .venv/everything
	$(BIN)/python bench/equal_tables.py equal --base $(BASE) $(if $(ONLY),--only $(ONLY))

# The site, into site/; needs no network. Warnings are errors.
docs: .venv/everything
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Every picture of the documentation, from small runs that it makes first: a few minutes. Needs Chromium.
docs-pictures: .venv/everything
	$(BIN)/python docs/drawings.py
	$(BIN)/python docs/pictures.py

# Every study of studies/ at nano size, two seeds, on the embedded corpus: about ten minutes on two cores.
study-smoke: .venv/everything
	OMP_NUM_THREADS=1 $(BIN)/python studies/run.py --smoke --jobs 2 --device cpu

# Comparisons, tables and figures of every study that was run, from its stored results; needs no GPU.
studies-report: .venv/everything
	$(BIN)/python studies/report.py

# Tests of our own studies: their pages, probes, and that the stored claims have the verdicts that they had.
studies-test: .venv/everything
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest studies/tests

# A source distribution, and the wheel built from it.
dist: .venv/core
	rm -rf dist build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) build
	$(BIN)/python -m build

# Timings: leave the machine alone meanwhile. What came out is in docs/benchmarks.md.
bench: .venv/core
	$(BIN)/python bench/decompose.py

# One thread: how the work grows is asked for, not how well threads share it.
bench-growth: .venv/everything
	OMP_NUM_THREADS=1 $(BIN)/python bench/growth.py

# Peak resident memory of a scan of 8 GB, written to the temporary folder first.
bench-memory: .venv/core
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/memory.py --fused

# Build time, size, first paint and tab switches of three reports.
bench-report: .venv/everything
	OMP_NUM_THREADS=1 PYTHONPATH=src $(BIN)/python bench/report.py

# CPU seconds and memory of whole commands; SIDES="--source ../old/src --source src" compares two versions.
bench-commands: .venv/everything
	$(BIN)/python bench/commands.py $(SIDES)

# Tables of deploy on a trace of a million tokens.
bench-deploy: .venv/core
	$(BIN)/python bench/deploy.py

# The rest runs on the CPU, in small, or with DEVICE="--device cuda" in the sizes of docs/benchmarks.md.
DEVICE ?=
bench-trace bench-monitor: bench-%: .venv/everything
	PYTHONPATH=src $(BIN)/python bench/$*.py $(DEVICE)

bench-intervene: .venv/everything
	OMP_NUM_THREADS=1 $(BIN)/python bench/intervene.py

bench-streamed: .venv/everything
	$(BIN)/python bench/execution.py $(or $(DEVICE),--layers 20 --hidden 512 --most 3GB --tokens 2048)

bench-lab: .venv/everything
	PYTHONPATH=src $(BIN)/python bench/lab.py $(DEVICE)
	$(if $(DEVICE),PYTHONPATH=src $(BIN)/python bench/captured.py)

# On a machine with a GPU; qwen3 writes 20 GB into the temporary folder.
bench-gpu: .venv/core
	$(BIN)/python bench/gpu.py mixtral --layers 12
	$(BIN)/python bench/gpu.py deepseek --layers 2
	$(BIN)/python bench/gpu.py qwen3 --layers 48

# WeightWatcher brings packages of its own, so it gets an environment of its own.
bench-peer: .venv-peer/ready
	.venv-peer/bin/python bench/against_weightwatcher.py

.venv-peer/ready: $(SOURCES)
	$(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS) --editable . weightwatcher==0.7.7
	@touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/core: .venv/bin/python $(SOURCES)
	$(INSTALL) --editable .
	@touch $@

.venv/everything: .venv/bin/python $(SOURCES)
	$(INSTALL) --editable ".[hf,export,maps,ray,dev,docs]"
	@touch $@ .venv/core

clean:
	rm -rf .venv .venv-peer runs site dist build
