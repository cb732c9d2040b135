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

# A torch that sees a GPU is kept, with the packages beside it; else the pinned versions are installed.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "Setting up $(VENV), a minute or two ..."
	@if $(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then \
	  $(PYTHON) -m venv --system-site-packages $(VENV) && $(BIN)/pip install -q -e '.[dev]'; \
	else \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/pip install -q -c constraints.txt -e '.[dev]'; \
	fi
	@touch $@
