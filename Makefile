# make demo   train a small transformer on digits, compute it with cutelab's kernels, compare with PyTorch
# make test   linters, type checker, tests and notebooks
# Each first sets up a virtual environment in $(VENV); `make demo PYTHON=python3.12 VENV=/tmp/venv` moves it.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed
ROOMS = layouts copies mmas kernels simulator

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

# A torch that sees the GPU is kept, with the CUDA packages it asks for: the environment also looks where
# $(PYTHON) finds its packages, and the DSL's libraries come for the CUDA of that torch. Everything else has the
# pinned version; without such a torch it too, for the CPU where the package index offers that.
EXTRAS_FOR_GPU = import torch; assert torch.cuda.is_available(); \
  print("dev,cu13" if torch.version.cuda.startswith("13") else "dev")

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Setting up $(VENV), a minute or two ..."
	@$(PYTHON) -m venv $(VENV)
	@if extras=$$($(PYTHON) -c '$(EXTRAS_FOR_GPU)' 2>/dev/null); then \
	  $(PYTHON) -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
	    > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth" && \
	  grep -v -e '^torch==' -e '^cuda-' constraints.txt > $(VENV)/constraints.txt; \
	else \
	  extras=dev && cp constraints.txt $(VENV)/constraints.txt; \
	fi && $(BIN)/pip install -q -c $(VENV)/constraints.txt -e ".[$$extras]"
	@touch $@
