VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
RANKS ?= 2

.PHONY: demo digits test lint unit bench bench-checkpoints clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[torch,tensorplay,demo,dev]'
	touch $@

demo: $(VENV)/installed  ## Train a small GPT on two processes and show the memory saved
	$(BIN)/python examples/train_gpt.py --ranks $(RANKS) $(ARGS)

digits: $(VENV)/installed  ## Train a classifier of handwritten digits with TensorPlay on two processes
	$(BIN)/python examples/tensorplay_digits.py --ranks $(RANKS) $(ARGS)

test: lint unit  ## Everything CI runs

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: $(VENV)/installed
	$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/installed  ## Measure training steps beside peers; about an hour
	$(BIN)/pip install --quiet -c constraints.txt fairscale
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[bench]'
	$(BIN)/python -m benchmarks.train_step $(ARGS)

bench-checkpoints: $(VENV)/installed  ## Measure saving and loading state beside peers; about half an hour
	$(BIN)/python -m benchmarks.checkpoints $(ARGS)

clean:
	rm -rf $(VENV) build runs
