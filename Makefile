# `make demo` and `make test` set up everything they need, from a fresh clone on.
TASK ?= search
SEED ?= 0
STEPS ?= 30
OUT ?= outputs/demo
SEARCH ?= embedded
BIN := .venv/bin
# Waiting threads must not spin: see CPU_ENVIRONMENT in src/agentic_rollout/verl_plugin/launch.py.
export OMP_WAIT_POLICY ?= PASSIVE
LOCK = $(BIN)/uv pip compile --quiet --python-platform x86_64-manylinux_2_28 --python-version 3.11 --no-header --no-emit-package agentic-rollout --no-annotate

.PHONY: setup demo ablation test check format bench lock clean

setup:            ## the environment in .venv/
	@scripts/install.sh .venv constraints/verl06-cpu.txt

demo: setup       ## train a tiny model to search, or to compute with code: make demo TASK=code SEED=1 STEPS=40
	@$(BIN)/agentic-rollout demo --task $(TASK) --seed $(SEED) --steps $(STEPS) --search $(SEARCH) --out $(OUT)

ablation: setup   ## the demo with and without the observation mask, three seeds each
	@$(BIN)/python bench/ablation.py

test: setup       ## everything, verl's trainer and vLLM included
	@$(BIN)/pytest

check: setup      ## style, types, import contracts, fast tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/pytest -m "not slow"

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup      ## the figures of the README: outputs/bench/
	@$(BIN)/python bench/overlap.py
	@$(BIN)/python bench/xquad.py
	@$(BIN)/python bench/recall.py
	@$(BIN)/python bench/scale.py
	@$(BIN)/python bench/soak.py
	@$(BIN)/python bench/sandbox.py

lock: setup       ## resolve constraints/*.in again
	@$(LOCK) constraints/verl06-cpu.in --override constraints/verl06-cpu.overrides.txt -o constraints/verl06-cpu.txt
	@$(LOCK) constraints/verl06-gpu.in -o constraints/verl06-gpu.txt

clean:
	rm -rf .venv .cache outputs checkpoints
