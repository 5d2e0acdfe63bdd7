# Everything a developer runs. Each target sets up what it needs, on a fresh machine too.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first interpreter of at least 3.11 that can make a virtual environment.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	  "$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  && echo "$$python" && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.up-to-date
STOCK := .venvs/stock
STOCK_LMCACHE := $(STOCK)/.lmcache-up-to-date
STOCK_VLLM := $(STOCK)/.vllm-up-to-date
STOCK_LOCKS := tests/conformance/requirements
# Unit tests compute; most integration tests wait for a window to pass, and so go many at a time.
COMPUTE := --numprocesses auto --dist worksteal
WAIT := --numprocesses 6 --dist worksteal
# Each process has a control plane of its own, which costs 9 seconds and 400 MB.
CONTROL_PLANES := --numprocesses 2 --dist loadfile
SOURCES := nodeagent operator tests demo docs $(wildcard benchmarks)

COMPILE := uv pip compile --no-config --quiet --universal --python-version 3.11 --generate-hashes \
  --no-emit-index-url --no-emit-find-links --no-header --upgrade

##@ Use

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z0-9-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(READY) ## Make .venv from the lock (python -m venv and pip only); nothing to do when up to date

$(READY): requirements/dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { \
	  echo "no Python 3.11 or newer with venv and ensurepip found: install one, or set PYTHON=" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.PHONY: demo
demo: $(READY) ## Watch an agent release a killed worker's memory and spare the others (10 s)
	@$(BIN)/python -m demo $(ARGS)

.PHONY: run
run: $(READY) ## Start an agent to use by hand; ARGS="--port 0 --log-level debug" adds flags
	$(BIN)/lmcache-nodeagent --l1-size-gb 1 $(ARGS)

.PHONY: cluster
cluster: $(READY) ## Start a Kubernetes control plane that stays, and print how to reach it
	$(BIN)/python -m tests.cluster.standing up build/cluster

.PHONY: cluster-down
cluster-down: $(READY) ## End the control plane of `make cluster`
	$(BIN)/python -m tests.cluster.standing down build/cluster

##@ Check

.PHONY: check
check: $(READY) verify ## Formatting, lint, types, layers, spelling, generated files
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/codespell

.PHONY: fmt
fmt: $(READY) ## Format the code and apply the safe fixes of the linter
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# The first run on a machine builds the API server from source, since there is nowhere to take it
# from: 5 to 17 minutes on 2 cores, once.
.PHONY: test
test: cluster-programs ## Unit, integration and API server tests with the coverage gates
	$(BIN)/coverage erase
	@echo "== 1 of 3: units"
	$(BIN)/coverage run -m pytest $(COMPUTE) tests/unit
	@echo "== 2 of 3: the agent as a process, with workers that are killed, frozen and cut off"
	$(BIN)/coverage run -m pytest $(WAIT) tests/integration
	@echo "== 3 of 3: the operator and its agents at a real API server"
	$(BIN)/coverage run -m pytest $(CONTROL_PLANES) tests/cluster
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --fail-under=95
	$(BIN)/coverage report --fail-under=100 --include='*/protocol/*,*/liveness/*'

.PHONY: unit
unit: $(READY) ## Unit tests: no sockets, threads or sleeps
	$(BIN)/pytest $(COMPUTE) tests/unit

.PHONY: explore
explore: $(READY) ## Random examples for the property tests, which else draw the same ones
	$(BIN)/pytest $(COMPUTE) --hypothesis-profile exploring $(ARGS) tests/unit

.PHONY: integration
integration: $(READY) ## Integration tests: the real agent as a process, real clients
	$(BIN)/pytest $(WAIT) tests/integration

.PHONY: conformance
conformance: $(READY) $(STOCK_LMCACHE) ## Stock LMCache adapters drive the agent (4 GB the first time)
	$(BIN)/pytest --timeout 300 tests/conformance

.PHONY: e2e
e2e: $(READY) $(STOCK_VLLM) ## Stock vLLM on the CPU with stock LMCache, end to end (minutes; 5 GB)
	$(BIN)/python -m tests.e2e.run $(ARGS)

.PHONY: bench
bench: $(READY) $(STOCK_LMCACHE) ## This agent and stock LMCache side by side; ARGS="--quick --only ping"
	$(BIN)/python -m benchmarks $(ARGS)

# The stock releases never share an environment with the project: their own lock, nothing resolved.
$(STOCK_LMCACHE): $(STOCK_LOCKS)/lmcache.txt
	"$(PYTHON)" -m venv $(STOCK)
	$(STOCK)/bin/python -m pip install --quiet --no-deps --require-hashes --requirement $<
	touch $@

$(STOCK_VLLM): $(STOCK_LOCKS)/vllm.txt $(STOCK_LMCACHE)
	$(STOCK)/bin/python -m pip install --quiet --no-deps --require-hashes --requirement $<
	touch $@

.PHONY: cluster-programs
cluster-programs: $(READY) ## Find the control plane's programs or build them (minutes, once)
	$(BIN)/python -m tests.cluster.programs

.PHONY: cluster-test
cluster-test: cluster-programs ## Tests against a real API server
	$(BIN)/pytest $(CONTROL_PLANES) tests/cluster

.PHONY: e2e-kube
e2e-kube: $(READY) ## The story on a real node: kubelet, containerd, the image (root; ARGS="-k killed")
	$(BIN)/python -m tests.e2e.kube $(ARGS)

.PHONY: kube-shell
kube-shell: $(READY) ## A shell on such a node with the operator installed (root); it ends with it
	$(BIN)/python -m tests.e2e.kube --shell $(ARGS)

##@ Maintain

.PHONY: generate
generate: $(READY) ## Write the generated references and the CRD again
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate_stubs.py

.PHONY: verify
verify: $(READY) ## Fail if a generated file is out of date
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/generate_stubs.py --check

.PHONY: lock
lock: ## Resolve the dependencies again into requirements/ (needs uv)
	$(COMPILE) --all-extras --group dev --output-file requirements/dev.txt pyproject.toml
	$(COMPILE) --extra nodeagent --extra operator --constraint requirements/dev.txt \
	  --output-file requirements/runtime.txt pyproject.toml
	$(COMPILE) --group build --constraint requirements/dev.txt --output-file requirements/build.txt

.PHONY: lock-stock
lock-stock: ## Resolve the stock environment's locks again (needs uv)
	$(COMPILE) --no-annotate --override $(STOCK_LOCKS)/left-out.txt \
	  --override $(STOCK_LOCKS)/vllm-overrides.txt \
	  --output-file $(STOCK_LOCKS)/vllm.txt $(STOCK_LOCKS)/vllm.in
	$(COMPILE) --no-annotate --override $(STOCK_LOCKS)/left-out.txt \
	  --constraint $(STOCK_LOCKS)/vllm.txt \
	  --output-file $(STOCK_LOCKS)/lmcache.txt $(STOCK_LOCKS)/lmcache.in

.PHONY: clean
clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) .venvs build dist htmlcov .coverage* .hypothesis .*_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
