# Every target works on a fresh machine: the first one makes .venv and installs into it.
# To use an environment of your own: make test PY=python

VENV := .venv
ifeq ($(origin PY),command line)
READY :=
else
PYTHON ?= python3
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

JOBS ?= 2
# One of several parts of the tests, as 2/8; all parts together are all of them.
PART ?=
PARTS := $(if $(PART),--part $(PART))
# In order of folders, those with ranks first: files of few tests are often the longest,
# and are not left for the end.
XDIST := -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Inductor's compiled kernels are kept, so a second run is fast.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
# So are compiled Python files, whatever the shell says: every process imports them.
unexport PYTHONDONTWRITEBYTECODE
# Each rank is one process on a shared machine; also keeps torchrun quiet.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-all test-gpu bench docs lint format clean

help:
	@echo "make demo      train a small Llama on 1 device and on a 2x2 mesh, compare losses"
	@echo "make test      the quick tests"
	@echo "make test-all  every test, the slow ones too; PART=2/8 runs an eighth of them"
	@echo "make test-gpu  tests of one NVIDIA GPU, with PY=python of an environment for it"
	@echo "make bench     the short benchmarks; JSON goes to .benchmarks/"
	@echo "make docs      the site of docs/, into site/"
	@echo "make lint      ruff and mypy"

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fxpar needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "installing into $(VENV), once; this downloads torch"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  --constraint constraints.txt torch
	@$(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable ".[test,dev,docs]"
	@touch $@

demo: $(READY)
	@$(PY) -m fxpar demo

test: $(READY)
	@$(PY) -m pytest -q $(XDIST) -m "not slow" $(PARTS) $(ARGS)

test-all: $(READY)
	@$(PY) -m pytest -q $(XDIST) $(PARTS) $(ARGS)

test-gpu: $(READY)
	@PYTHON=$(PY) tests/on_gpu.sh .benchmarks/gpu

bench: $(READY)
	@mkdir -p .benchmarks
	@$(PY) -m pytest -q -p no:cacheprovider benchmarks/bench_rules.py \
	  --benchmark-columns=median,iqr,rounds --benchmark-json=.benchmarks/bench_rules.json
	@$(PY) benchmarks/bench_compile.py --short
	@$(PY) benchmarks/bench_step.py --short

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict --site-dir site

lint: $(READY)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: $(READY)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean:
	rm -rf $(VENV) .cache .benchmarks site build *.egg-info
