# `make demo` and `make test` set up all they need in .venv; nothing else is written outside
# this folder but the package manager's cache.

# The versions in constraints.txt need Python 3.11; torch_utils itself runs on 3.10 too.
AT_LEAST := sys.version_info >= (3, 11)
PYTHON ?= $(or $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not $(AT_LEAST))' 2>/dev/null && echo $$p && break; done),python3)
FOUND = $(shell $(PYTHON) -c 'import sys; print("fine" if $(AT_LEAST) else sys.version.split()[0])' \
	2>/dev/null)
BIN := .venv/bin
# Four, for two cores: some of the tests wait for others to end, or to hang. In the order that
# tests/conftest.py gives them.
# PYTEST_OPTIONS adds to them: .ci/run asks for a second try of tests that fail.
PYTEST := $(BIN)/python -m pytest -n 4 --no-loadscope-reorder --dist loadgroup $(PYTEST_OPTIONS)
# The packaged model is a local folder: nothing has to be looked up on a hub.
export HF_HUB_OFFLINE := 1

# Two runs of the tests at once would each take the cores that the other needs.
.NOTPARALLEL:
.PHONY: demo test test-slow test-real test-pythons test-ray test-versions test-service test-all freeze hazards lint format bench-exit bench-release bench-clean-exit bench-rag bench-encode bench-cache bench-unload bench-start bench-quality bench-host torture-save fuzz-index soak screenshots test-gpu test-gpu-stand-in bench-gpu examples clean

# Threads that wait for each other sleep instead of spinning: a busy machine gets there sooner.
demo: .venv/.installed
	OMP_WAIT_POLICY=PASSIVE $(BIN)/clean-exit --max-shutdown 10 -- $(BIN)/rag-demo demo --progress terminal

# Four minutes on two cores; the two that follow are what it leaves out, test-all is all of them.
test: .venv/.installed
	$(PYTEST) -m "not slow"

test-slow: .venv/.installed
	$(PYTEST) -m "slow and not real"

# Servers, pools and launchers of other packages under clean-exit; downloads many of them.
test-real: .venv/.installed .venv/.corpus
	$(PYTEST) -m real

# The same on each Python from 3.10 to 3.13 that there is, in environments made for it; a table.
# PYTHONS="3.11 3.13" makes these columns anew.
test-pythons: .venv/.installed .venv/.corpus
	PYTHONPATH=tests $(BIN)/python -m support.real_table

# The tests with the oldest and the newest packages that pyproject.toml allows; a table. Downloads
# gigabytes. ROWS=oldest makes this row anew, KEPT=folder keeps the environments.
test-versions: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	PYTHONPATH=tests $(BIN)/python -m support.versions $(KEPT)

# Actors of a real Ray on this machine; downloads it.
test-ray: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(PYTEST) tests/torch_utils/test_ray.py

# The service in a browser (Debian's chromium: apt-get install chromium), with LangChain, and fuzzed.
test-service: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[service-test]'
	$(PYTEST) tests/rag_demo/service

test-all: test test-slow test-real

# On a machine with a GPU, by whatever Python it has with torch: no environment is made for it.
# RESULTS names the folder for what is measured; benchmarks/results/gpu if it is not given.
GPU_PYTHON = $(if $(filter command environment,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON)))

test-gpu:
	RESULTS=$(RESULTS) $(GPU_PYTHON) tests/gpu/run.py

# The same over a stand-in for CUDA's driver, which is no GPU. ENVIRONMENT keeps what is downloaded,
# or names an environment that has torch for CUDA.
test-gpu-stand-in: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python tests/gpu/stand_in/run.py $(ENVIRONMENT)

bench-gpu:
	RESULTS=$(RESULTS) $(GPU_PYTHON) -m benchmarks.gpu

# After a decision that changes what must hold: see tests/acceptance/README.md.
freeze: .venv/.installed
	PYTHONPATH=tests $(BIN)/python tests/test_frozen.py

hazards: .venv/.installed
	$(PYTEST) -q tests/acceptance/hazards

bench-exit: .venv/.installed
	$(BIN)/python -m benchmarks.bench_exit
	$(BIN)/python -m benchmarks.bench_resource

bench-release: .venv/.installed
	$(BIN)/python -m benchmarks.bench_release
	$(BIN)/python -m benchmarks.plot_memory

bench-clean-exit: .venv/.installed
	$(BIN)/python -m benchmarks.bench_clean_exit
	$(BIN)/python -m benchmarks.bench_clean_exit_lint

bench-rag: .venv/.installed
	$(BIN)/python -m benchmarks.bench_rag
	$(BIN)/python -m benchmarks.bench_open
	$(BIN)/python -m benchmarks.bench_change

# BEIR names a folder with corpus.jsonl and queries.jsonl, such as that of SciFact.
bench-encode: .venv/.installed
	$(BIN)/python -m benchmarks.bench_encode $(if $(BEIR),--beir $(BEIR))

bench-cache: .venv/.installed
	$(BIN)/python -m benchmarks.bench_cache

bench-unload: .venv/.installed
	$(BIN)/python -m benchmarks.bench_unload

bench-start: .venv/.installed
	$(BIN)/python -m benchmarks.bench_start

# BEIR names a folder with corpus.jsonl, queries.jsonl and qrels/test.tsv.
bench-quality: .venv/.installed
	$(BIN)/python -m benchmarks.bench_quality --beir $(BEIR)

bench-host: .venv/.installed
	$(BIN)/python -m benchmarks.bench_host
	$(BIN)/python -m benchmarks.bench_cycles

torture-save: .venv/.installed
	PYTHONPATH=tests $(BIN)/python -m acceptance.torture.saves save 200
	PYTHONPATH=tests $(BIN)/python -m acceptance.torture.ingestion 200

fuzz-index: .venv/.installed
	PYTHONPATH=tests $(BIN)/python -m acceptance.torture.saves fuzz 20000

# SOAK_S=3600 for an hour; SIGTERM comes in the middle of the load.
soak: .venv/.installed
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.soak_service

# The page, light and dark; needs Debian's chromium (apt-get install chromium).
screenshots: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[service-test]'
	$(BIN)/python -m benchmarks.screenshots

examples: .venv/.installed
	$(PYTEST) -q tests/test_readme.py tests/rag_demo/test_examples.py tests/examples

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict torch_utils clean_exit rag_demo
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m clean_exit.lint

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One that was asked for is refused also where another has made .venv already.
ifneq ($(filter command environment,$(origin PYTHON)),)
ifneq ($(FOUND),fine)
$(error this needs Python 3.11 or newer, and $(PYTHON) is $(or $(FOUND),not there): make PYTHON=python3.12 $(or $(MAKECMDGOALS),demo))
endif
endif

.venv/.installed: pyproject.toml constraints.txt
	$(if $(filter fine,$(FOUND)),,$(error this needs Python 3.11 or newer, \
and $(PYTHON) is $(or $(FOUND),not there): make PYTHON=python3.12 $(or $(MAKECMDGOALS),demo)))
	@echo "installing all that development needs into .venv; it takes minutes, once"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[rag,pdf,model,service,test,dev,bench]'
	touch $@

# Real programs for the slow tests, one by one: what cannot be installed is skipped there by name.
.venv/.corpus: .venv/.installed
	$(BIN)/python -c 'import importlib.metadata as m; \
print(*(r.split(";")[0] for r in m.requires("torch-cleanup") if "corpus" in r), sep="\n")' \
	| while read name; do $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt "$$name" || echo "without $$name"; done
	touch $@

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
