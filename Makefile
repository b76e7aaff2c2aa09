# make demo    make an environment and a video with the bundled model, dense and sparse side by side
# make test    run the tests, in five minutes on two idle cores
# make slow    run the tests that five minutes have no room for
# make lint    ruff and mypy, as in pre-commit and CI
# make clean   remove what the commands above made

PYTHON ?= python3
# An unconstrained torch may bring gigabytes of CUDA libraries that a machine without a GPU cannot
# use. Any pip arguments do: another version, a wheel, or a package index of your own, as in
#   make demo TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0

# Test processes; each takes about a GiB.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PROMPT := a red circle moves left over a blue gradient
DEMO := out/demo

.PHONY: demo test slow lint clean

demo: $(VENV)/.installed
	@mkdir -p $(dir $(DEMO))
	@echo "The demo takes about half a minute on two idle cores."
	$(BIN)/chipsparse generate "$(PROMPT)" --frames 9 --fps 8 --compare --output $(DEMO).mp4
	@echo "Dense and sparse side by side: $(CURDIR)/$(DEMO)-compare.mp4"

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --dist loadfile \
	  --no-loadscope-reorder

slow: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not gpu" -n $(WORKERS) --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(DEMO).mp4 $(DEMO)-*.mp4 build dist .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; choose one with: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "This Python cannot make environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing $(TORCH) and what else is needed; this takes some minutes the first time"
	@$(BIN)/python -m pip install --quiet $(TORCH)
	@$(BIN)/python -m pip install --quiet --editable ".[test]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@
