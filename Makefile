# Every target sets itself up: a fresh machine needs make and Python 3.11 or newer, nothing else.
# Another interpreter: make PYTHON=/path/to/python3.12 …

PYTHON ?= python3.11 python3.12 python3.13 python3
BIN := .venv/bin
READY := .venv/.ready
PYTEST := $(BIN)/python -m pytest --hypothesis-profile=ci
PURE := router/core/* engine_patches/admission/* loadgen/diagnose/analysis/* $(addprefix router/, \
    access/key_ring.py access/key_limits.py http/head.py http/port.py http/refusal.py \
    recording/lines.py recording/recorder.py observe/observed.py)

.NOTPARALLEL:
.PHONY: help venv engine prometheus ray up up-envoy demo figures gpu test test-fast test-engine test-releases soak check format docs bench bench-router league league-quick evidence clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

venv: $(READY)  ## make .venv with evenstep and its development tools

# The stamp is written last: an environment that was left half made is made again from the start.
$(READY): pyproject.toml
	@for python in $(PYTHON) ""; do \
	    test -n "$$python" || { \
	        echo "make: no usable Python: need 3.11 or newer with venv and pip (tried: $(PYTHON))." >&2; \
	        echo "      Install one (Debian: python3-venv), or name it: make PYTHON=/path/to/python3" >&2; \
	        exit 1; }; \
	    "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	        2>/dev/null && break; \
	done; \
	test -e $@ || { echo "making .venv with $$python"; "$$python" -m venv --clear .venv; }
	@rm -f $@
	@$(BIN)/python -m pip install --quiet --quiet --editable '.[dev]'
	@echo "compiling the solver, once (half a minute)"
	@$(BIN)/python -m router.core.policies.bfio.calibration
	@touch $@

engine: $(READY)  ## build the real vLLM CPU engine outside the clone; prints its path last
	@$(BIN)/python deploy/engine/build.py

prometheus: $(READY)  ## lay Debian's Prometheus beside the engine, unless there is one
	@$(BIN)/python -m deploy.prometheus.install

ray: $(READY)  ## install Ray Serve, for its tests alone, in an environment beside the engine
	@$(BIN)/python -m tests.support.ray_serve

up: $(READY)  ## router with its page, emulated workers and Prometheus, until Ctrl-C
	@$(BIN)/python -m deploy.local.up

up-envoy: $(READY)  ## Envoy, the picker and emulated workers, until Ctrl-C
	@$(BIN)/python -m deploy.envoy.up

demo: $(READY)  ## compare policies on emulated workers, no GPU needed
	@$(BIN)/evenstep demo

figures: $(READY)  ## simulate the paper's experiments again (goes on where it was interrupted)
	$(BIN)/evenstep figures --out tests/data/figures

# Nothing is installed: a machine with a GPU may have no network.
GPU_PYTHON ?= $(or $(wildcard $(BIN)/python),python3)
GPU_FLAGS ?=
gpu:  ## measure one GPU in ten minutes (goes on where it ended); a dry run where there is none
	@$(GPU_PYTHON) -m tests.gpu $(GPU_FLAGS)

# The engine is built beside the checks: the one waits for the network, the others compute.
test: $(READY)  ## everything but the slow proofs, real vLLM included (half an hour on two cores)
	@$(MAKE) --no-print-directory engine & engine=$$!; trap 'kill $$engine; exit 1' INT TERM; \
	$(MAKE) --no-print-directory check || { kill $$engine 2>/dev/null; exit 1; }; wait $$engine
	@REQUIRE_ENGINE=1; export REQUIRE_ENGINE; $(call LANES,not slow)

test-fast: check  ## everything that needs no vLLM
	@$(call LANES,not engine and not slow)

# Three lanes share the machine, the longest first. Tests that start no process come last, and only
# theirs are covered: other processes could not be seen. Two lanes show their lines at the end.
UNITS := tests/unit tests/property tests/contract
ENGINES := $(wildcard tests/integration/test_engine*.py)
SLOWEST := --durations=20 --durations-min=5
LANES = nice -n 10 $(PYTEST) -p no:cacheprovider -m "$(1)" --cov --cov-report= $(UNITS) >.units.log 2>&1 & \
	units=$$!; \
	nice -n 5 $(PYTEST) -p no:cacheprovider $(SLOWEST) -m "$(1)" tests/integration $(ENGINES:%=--ignore=%) >.parts.log 2>&1 & \
	parts=$$!; trap 'kill $$units $$parts; exit 1' INT TERM; \
	$(PYTEST) $(SLOWEST) -m "$(1)" $(ENGINES) tests/e2e; failed=$$?; \
	wait $$parts || failed=1; cat .parts.log; wait $$units || failed=1; cat .units.log; \
	rm .parts.log .units.log; \
	echo "pure core, gate at 100 % of lines and branches:"; \
	$(BIN)/coverage report --include="$$(echo '$(PURE)' | tr ' ' ,)" --fail-under=100 && exit $$failed

# Two lanes: what mostly starts and computes, beside engines whose steps are timed.
COMPUTING := $(addprefix tests/integration/test_,engine_versions.py engine_releases.py engine_plan.py engine_plugin.py)
test-engine: engine  ## the slow proofs on real vLLM
	@REQUIRE_ENGINE=1; export REQUIRE_ENGINE; \
	nice -n 2 $(PYTEST) -p no:cacheprovider $(SLOWEST) -m "engine and slow" $(COMPUTING) >.parts.log 2>&1 & \
	parts=$$!; trap 'kill $$parts; exit 1' INT TERM; \
	$(PYTEST) $(SLOWEST) -m "engine and slow" $(COMPUTING:%=--ignore=%); failed=$$?; \
	wait $$parts || failed=1; cat .parts.log; rm .parts.log; exit $$failed

test-releases: engine  ## whole CPU engines of every release that can be had (half an hour)
	EVENSTEP_ALL_RELEASES=1 REQUIRE_ENGINE=1 $(PYTEST) $(SLOWEST) -m "engine and slow" $(addprefix tests/integration/test_engine_,releases.py runners.py)

soak: $(READY)  ## the long runs on emulated workers, and FastAPI's data plane in processes
	$(PYTEST) -m "slow and not engine"

check: $(READY)  ## lint, formatting, types, import rules (what pre-commit runs)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m docs.stale_figures

format: $(READY)  ## format, and fix what the linter can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: .venv/.docs  ## build the site of docs/ in build/site; refuses dead links
	@$(BIN)/python -m docs.generate --check
	@$(BIN)/python -m mkdocs build --strict

.venv/.docs: $(READY)
	@$(BIN)/python -m pip install --quiet --quiet --editable '.[docs]'
	@touch $@

bench: $(READY)  ## every script in tests/bench
	@for script in tests/bench/bench_*.py; do \
	    echo "== $$script"; $(BIN)/python "$$script" || exit; \
	done

bench-router: $(READY)  ## CPU per token and per request, beside the Rust routers of the registry
	$(BIN)/python tests/bench/bench_router.py

# ENGINE=vllm URLS='URL,slots=N …': before engines that run already, as serve --worker takes them.
LEAGUE_FLAGS ?=
league: $(READY)  ## other routers before the same engines, emulated ones or yours (hours; goes on where it ended)
	$(BIN)/python -m tests.bench.league $(if $(ENGINE)$(URLS),--urls '$(URLS)') $(LEAGUE_FLAGS)
	@$(BIN)/python -m docs.generate

league-quick: $(READY)  ## the league of four routers in two workloads
	$(BIN)/python -m tests.bench.league --quick $(LEAGUE_FLAGS)
	@$(BIN)/python -m docs.generate

evidence: $(READY)  ## measure stale figures again, the shortest first; MINUTES=30 bounds the time
	@$(BIN)/python -m docs.evidence $(MINUTES:%=--minutes %)

clean:  ## delete .venv, caches and build products (the engine stays)
	rm -rf .venv .parts.log .units.log .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	rm -rf build dist out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
