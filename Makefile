# make demo: from nothing to a trained, exported GPT.   make test: from nothing to a checked repository.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RECIPE ?= tiny
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')

# uv, where there is one, takes a third of pip's time. It knows nothing of pip's settings, an own index among them.
INSTALL := $(if $(shell command -v uv),uv pip install --quiet --python $(BIN)/python,$\
  $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check)

export PATH := $(CURDIR)/$(BIN):$(PATH)
export TOKENIZERS_PARALLELISM ?= true
# Python compiles what is imported, and keeps it; pip would compile everything that it installs, for a minute.
unexport PYTHONDONTWRITEBYTECODE

PIPELINE ?=

.PHONY: demo pipeline test lint schema lock clean help

help:
	@sed -n 1p Makefile; echo "make pipeline (text to report, what is up to date left out), make lint, make schema (regenerates the JSON schemas), make lock (writes requirements.lock), make clean"

# What a step on the CPU frees, glibc keeps for the next one. Asked for again, each page of it costs a page fault.
demo: export MALLOC_TRIM_THRESHOLD_ ?= 4294967296
demo: export MALLOC_MMAP_THRESHOLD_ ?= 33554432
# Two processes: on two GPUs, or on the CPU where there is none; one where there is a single GPU.
demo: NUM_GPUS ?= $(if $(filter 1,$(GPUS)),1,2)
demo: $(VENV)/installed
	python data_prep.py --recipe $(RECIPE)
	deepspeed --num_gpus=$(NUM_GPUS) train.py --recipe $(RECIPE)
	python -m pretraining.evaluation runs/$(basename $(notdir $(RECIPE))) --prompt "def " --tokens 128

# What is up to date is left out. Further options: make pipeline RECIPE=30b PIPELINE="--gpu H100 --publish my-name/30b"
pipeline: NUM_GPUS ?= $(if $(filter-out 0,$(GPUS)),$(GPUS),2)
pipeline: $(VENV)/installed
	python -m pretraining.pipeline --recipe $(RECIPE) --launcher "deepspeed --num_gpus=$(NUM_GPUS)" $(PIPELINE)

# A file's tests stay together; runs that several files look at are made once for all processes. Three of them keep two
# cores busy: tests wait for kills, time-outs and other processes.
# GPUs are hidden from all tests but those marked `gpu`, which run first and alone where there is one.
# On a new clone mypy takes a minute of one core. Meanwhile the other one compiles what the tests import: three workers that
# begin together would each compile it.
test: BESIDE := python -c 'from tests.gear.forked import IMPORTS; exec(IMPORTS)' >/dev/null 2>&1 &
test: $(VENV)/installed-dev lint
	$(if $(filter-out 0,$(GPUS)),python -m pytest -m gpu)
	python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed-dev
	ruff check .
	ruff format --check .
	$(BESIDE) mypy

schema: $(VENV)/installed
	python recipes/generate_schema.py

# From an environment that holds requirements-dev.txt and nothing else. The build of torch is the machine's, and so are the
# packages of CUDA that it brings.
lock: $(VENV)/installed-dev
	grep '^#' requirements.lock > requirements.lock.new
	python -m pip freeze --all --exclude pip | grep -Ev '^(cuda-|nvidia-(cu|n)|triton=)' | sed 's/+cpu$$//; s/+cu[0-9]*$$//' >> requirements.lock.new
	mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) data runs

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11, which transformers 5 needs; make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone: a range that another package states must never choose its build.
$(VENV)/installed: requirements.txt | $(BIN)/python
	$(INSTALL) "$$(grep '^torch==' requirements.txt)"
	$(INSTALL) -r requirements.txt
	@touch $@

$(VENV)/installed-dev: requirements-dev.txt requirements-remote.txt requirements-data.txt requirements-trackers.txt requirements-eval.txt requirements-flows.txt requirements-ray.txt $(VENV)/installed
	$(INSTALL) -r requirements-dev.txt
	@touch $@
