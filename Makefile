# The table of contents of this project. Everything is built under .build/ and .venv/ here, and big
# builds (control plane, engine) in a cache outside the tree: SPECDECODE_CACHE, default
# ~/.cache/specdecode.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ------------------------------------------------------------------------------- environment

.PHONY: setup
setup: .venv/.done ## Make .venv with the console scripts (demo and test call it themselves)

.venv/.done: requirements.lock pyproject.toml vllm-image/plugin/pyproject.toml vllm-image/simulator/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make setup PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --editable . --editable vllm-image/plugin --editable vllm-image/simulator
	@touch $@

.PHONY: lock
lock: setup ## Lock the tested versions of all dependencies anew
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url \
	  --no-emit-find-links --group dev pyproject.toml --output-file requirements.lock \
	  --custom-compile-command "make lock"

.PHONY: cluster
cluster: setup ## Build the local Kubernetes control plane (8 CPU minutes the first time)
	tests/cluster/build

.PHONY: prometheus
prometheus: setup ## Build Prometheus with Kubernetes discovery (10 CPU minutes the first time)
	$(BIN)/python -m tests.support.prometheus --fetch

.PHONY: engine
engine: setup ## Make the real vLLM engine for the CPU and its tiny models (6 GB)
	vllm-image/engine/make-engine

# ------------------------------------------------------------------------------------- checks

.PHONY: check
check: lint types imports verify-crds verify-features unit ## Lint, types, import contracts, unit tests

.PHONY: lint
lint: setup
	@test ! -e operator/__init__.py || { echo "operator/ must not be a package: it would shadow the standard library"; exit 1; }
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint vllm-image/Dockerfile operator/Dockerfile

.PHONY: format
format: setup ## Format the code
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

.PHONY: types
types: setup
	$(BIN)/mypy

.PHONY: imports
imports: setup
	$(BIN)/lint-imports

.PHONY: unit
unit: setup ## Unit and property tests: nothing else needed
	$(PYTEST) -q tests -m "not integration and not server and not e2e and not engine"

.PHONY: crds
crds: setup ## Generate crds/ from the models
	$(BIN)/python -m specdecode_operator.api.crd

.PHONY: verify-crds
verify-crds: setup
	$(BIN)/python -m specdecode_operator.api.crd --check

.PHONY: features
features: setup ## Write the operator's copy of vllm-image/features.yaml
	$(BIN)/python vllm-image/make-features

.PHONY: verify-features
verify-features: setup
	$(BIN)/python vllm-image/make-features --check

# -------------------------------------------------------------------------------------- tests

.PHONY: test
test: check contract integration e2e ## Checks and tests on a real API server, Prometheus and engine

.PHONY: contract
contract: setup ## Simulated servers as processes: the contract with the real engine, each fault
	$(PYTEST) -q tests -m "server and not e2e"

.PHONY: integration
integration: setup cluster prometheus ## Tests on the real API server and the real Prometheus
	@if command -v go > /dev/null; then go -C tests/cluster test ./rewrite; fi
	$(PYTEST) -q tests -m integration

.PHONY: e2e
e2e: setup cluster prometheus engine ## The whole course with the real engine, each part a process
	$(PYTEST) -q tests -m e2e

.PHONY: test-vllm
test-vllm: setup engine ## The plugin on the real engine
	$(PYTEST) -q tests -m engine

.PHONY: test-node
test-node: setup ## The product on a real kubelet, containerd and runc (root; skips elsewhere)
	$(BIN)/python -m tests.node

# ------------------------------------------------------------------------------ things to see

.PHONY: demo
demo: setup cluster prometheus $(if $(filter vllm,$(ENGINE)),engine) ## The operator tunes three engines live, then falls to speculation off (ENGINE=vllm: the real engine)
	$(BIN)/python -m tests.demo

.PHONY: bench
bench: setup cluster prometheus engine ## Measure what docs/benchmarks.md says
	$(BIN)/python -m tests.bench

.PHONY: bench-simulator
bench-simulator: setup ## Measure the engine model in virtual time
	$(BIN)/python -m tests.bench.simulator

.PHONY: bench-prediction
bench-prediction: setup engine ## Fit a profile to the real engine at three loads, predict a fourth
	$(BIN)/python -m tests.bench.prediction

.PHONY: cluster-up
cluster-up: setup cluster ## Start a local cluster in .build/cluster (make cluster-down stops it)
	$(BIN)/python -m tests.support.cluster up --dir .build/cluster

.PHONY: cluster-down
cluster-down: setup ## Stop the cluster that cluster-up started
	$(BIN)/python -m tests.support.cluster down --dir .build/cluster

.PHONY: clean
clean: ## Remove what was made here (the cache outside the tree stays)
	@if test -e .build/cluster/lock -a -x $(BIN)/python; then $(MAKE) --no-print-directory cluster-down; fi
	rm -rf .build .venv
