# Every target does its own set-up: `make demo` and `make test` are first commands on a fresh machine.
# PYTHON chooses the interpreter the environment is made from; ARGS reaches the program, as in
#   make demo ARGS="--config.seed=1 --config.run_name=second"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RECIPE ?= config/grpo.py:tiny_recam
ARGS ?=

# Two processes on two cores: more threads than that only get in each other's way.
export OMP_NUM_THREADS ?= 1

CPU_BUILD ?= $(shell command -v nvidia-smi > /dev/null || echo --extra-index-url https://download.pytorch.org/whl/cpu)

CHECK_PYTHON := import sys; sys.version_info >= (3, 10) or sys.exit("flow_grpo needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; pass PYTHON=/path/to/python3")

REF ?= HEAD

.PHONY: setup demo test test-slow lint bench docs same-numbers

setup: $(READY)

# The stamp is newer than both lists when the environment is complete; an interrupted set-up is taken up again.
# torch comes first and alone: its exact pin decides the build before anything else can ask for another. The package
# index's own is the CUDA build, gigabytes that a machine without nvidia-smi has no use for.
$(READY): requirements.txt requirements-dev.txt requirements-server.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(CPU_BUILD) "$$(grep '^torch==' requirements.txt)"
	$(BIN)/python -m pip install -r requirements.txt -r requirements-dev.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation --editable .
	@touch $@

# After Ctrl-C torchrun waits so long for the epoch to end, saved, before it kills; 30 s otherwise.
demo: export TORCH_ELASTIC_SHUTDOWN_TIMEOUT ?= 600
demo: setup
	$(BIN)/torchrun --standalone --nproc_per_node=2 train_grpo.py --config $(RECIPE) $(ARGS)
	$(BIN)/python tools/report.py --config $(RECIPE) $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow --timeout 1800 $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python tools/dev/bench.py --config $(RECIPE) --json $(ARGS)

# The pages of knobs and metrics (a test fails when one is stale), then the site: site/index.html needs no server and no network.
docs: setup
	$(BIN)/python -m flow_grpo.settings.reference > docs/config.md
	$(BIN)/python -m flow_grpo.reporting.metric_names > docs/metrics.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

# Whether the working tree's runs give the numbers of commit REF; see CONTRIBUTING.md.
same-numbers: setup
	$(BIN)/python tools/dev/same_numbers.py --ref $(REF) $(ARGS)
