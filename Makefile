# `make demo` and `make test` set up everything they need, from a fresh clone on; VERL=0.9 uses the other line of verl.
VERL ?= 0.6
TASK ?= search
SEED ?= 0
STEPS ?= 30
OUT ?= outputs/demo
SEARCH ?= embedded
VENV := $(if $(filter 0.9,$(VERL)),.venv09,.venv)
BIN := $(VENV)/bin
CPU_LOCK := constraints/verl$(subst .,,$(VERL))-cpu.txt
# Waiting threads must not spin: see CPU_ENVIRONMENT in src/agentic_rollout/verl_plugin/launch.py.
export OMP_WAIT_POLICY ?= PASSIVE
RESOLVE = $(BIN)/uv pip compile --quiet --python-platform x86_64-manylinux_2_28 --python-version 3.11 --no-header --no-emit-package agentic-rollout --no-annotate

.PHONY: setup demo ablation test lint check format bench lock clean

setup:            ## the environment: .venv/, or .venv09/ with VERL=0.9
	@scripts/install.sh $(VENV) $(CPU_LOCK)

demo: setup       ## train a tiny model to search, or to compute with code: make demo TASK=code SEED=1 STEPS=40
	@$(BIN)/agentic-rollout demo --task $(TASK) --seed $(SEED) --steps $(STEPS) --search $(SEARCH) --out $(OUT)

ablation: setup   ## the demo with and without the observation mask, three seeds each
	@$(BIN)/python bench/ablation.py

test: setup       ## everything, verl's trainer and vLLM included
	@$(BIN)/pytest

lint: setup       ## style, types, import contracts
	@$(BIN)/ruff check --no-cache .  # its cache does not know that a module has become first-party
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

check: lint       ## the same, and the fast tests
	@$(BIN)/pytest -m "not slow"

format: setup
	@$(BIN)/ruff check --fix --no-cache .
	@$(BIN)/ruff format .

bench: setup      ## the figures of the README: outputs/bench/; VERL=0.9 has its own
ifeq ($(VERL),0.9)
	@$(BIN)/python bench/loops.py
else
	@$(BIN)/python bench/overlap.py
	@$(BIN)/python bench/xquad.py
	@$(BIN)/python bench/recall.py
	@$(BIN)/python bench/scale.py
	@$(BIN)/python bench/soak.py
	@$(BIN)/python bench/sandbox.py
endif

lock: setup       ## resolve constraints/*.in again
	@$(RESOLVE) constraints/verl06-cpu.in --override constraints/verl06-cpu.overrides.txt -o constraints/verl06-cpu.txt
	@$(RESOLVE) constraints/verl06-gpu.in -o constraints/verl06-gpu.txt
	@$(RESOLVE) constraints/verl09-cpu.in --override constraints/verl09-cpu.overrides.txt -o constraints/verl09-cpu.txt
	@$(RESOLVE) constraints/verl09-gpu.in -o constraints/verl09-gpu.txt

clean:
	rm -rf .venv .venv09 .cache outputs checkpoints
