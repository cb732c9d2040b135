# make demo   train a small network, compute it with cutelab's GEMM, compare with PyTorch
# make test   linters, type checker, tests and notebooks
# Each first sets up a virtual environment in $(VENV); `make demo PYTHON=python3.12 VENV=/tmp/venv` moves it.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed
ROOMS = layouts copies mmas kernels

.PHONY: demo test lint format clean

demo: $(INSTALLED)
	$(BIN)/python demo.py

test: lint
	$(BIN)/python -m pytest -n $(JOBS) -q

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/mypy/cutelab
	@for room in $(ROOMS); do ln -sfn ../../../$$room build/mypy/cutelab/$$room; done
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache

# A torch that sees the GPU is kept: the environment also looks where $(PYTHON) finds its packages.
# Else the pinned versions are installed, in which torch comes for the CPU where the package index offers that.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "Setting up $(VENV), a minute or two ..."
	@$(PYTHON) -m venv $(VENV)
	@if $(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then \
	  $(PYTHON) -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
	    > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth" && \
	  $(BIN)/pip install -q -e '.[dev]'; \
	else \
	  $(BIN)/pip install -q -c constraints.txt -e '.[dev]'; \
	fi
	@touch $@
