# Every target installs what it needs into .venv. Outside of this folder, only the package
# manager's cache is written.

# The versions in constraints.txt need Python 3.11; the packages themselves also run on 3.10.
AT_LEAST := sys.version_info >= (3, 11)
PYTHON ?= $(or $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(not $(AT_LEAST))' 2>/dev/null && echo $$p && break; done),python3)
FOUND = $(shell $(PYTHON) -c 'import sys; print("fine" if $(AT_LEAST) else sys.version.split()[0])' \
	2>/dev/null)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The dependency groups that constraints.txt covers.
GROUPS := test dev wheel service-test corpus applications postgres ray bench docs
# Four workers on two cores, because many tests wait for a program to end. tests/conftest.py sets
# the order. .ci/run uses PYTEST_OPTIONS to run failed tests a second time.
PYTEST := $(BIN)/python -m pytest -n 4 --no-loadscope-reorder --dist loadgroup $(PYTEST_OPTIONS)
# The packaged model is a local folder, so no test needs a model hub.
export HF_HUB_OFFLINE := 1

# Two test runs at once would compete for the cores.
.NOTPARALLEL:
.PHONY: demo recording test test-slow test-often test-real test-pythons test-postgres test-ray test-versions test-service test-all wheel test-wheel lock prose hazards lint format bench-exit bench-release bench-clean-exit bench-rag bench-encode bench-ray bench-quality bench-postgres bench-host torture-save fuzz-index soak screenshots test-gpu test-gpu-stand-in bench-gpu examples figures docs clean

# Waiting threads sleep instead of spinning, which is faster on a busy machine.
demo: .venv/.installed
	OMP_WAIT_POLICY=PASSIVE $(BIN)/clean-exit --max-shutdown 10 -- $(BIN)/rag-demo demo docs

# Takes about four minutes on two busy cores. test-slow and test-real run the remaining tests.
test: .venv/.installed
	$(PYTEST) -m "not slow"

test-slow: .venv/.installed .venv/.applications
	$(PYTEST) -m "slow and not real"

# Runs `make test` ten times while two other processes keep both cores busy. Takes about an hour.
test-often: .venv/.installed
	$(BIN)/python -m benchmarks.repeat_tests 10 2

# Runs servers, pools and launchers of other packages under clean-exit. Downloads many packages.
test-real: .venv/.installed .venv/.corpus
	$(PYTEST) -m real

# Runs test-real on each Python from 3.10 to 3.14 that is installed, and writes a table.
# PYTHONS="3.11 3.13" updates only these columns.
test-pythons: .venv/.installed .venv/.corpus
	$(BIN)/python -m tests.support.real_table

# Runs the tests with the oldest and the newest packages that pyproject.toml allows, and writes a
# table. Downloads gigabytes. ROWS=oldest updates only this row; KEPT=folder keeps the environments.
test-versions: .venv/.installed
	$(BIN)/python -m tests.support.versions $(KEPT)

# Runs actors of a real Ray, and a cluster of two nodes, on this machine. Downloads Ray.
test-ray: .venv/.ray
	$(subst $(BIN),.venv/ray/bin,$(PYTEST)) tests/torch_utils/test_ray.py tests/rag_demo/test_ray.py

# Tests the Postgres store on a real server, which it sets up with pgvector. Downloads 25 MB.
test-postgres: .venv/.postgres
	$(subst $(BIN),.venv/postgres/bin,$(PYTEST)) tests/rag_demo/postgres

# Tests the service in a browser (apt-get install chromium), with LangChain and with a fuzzer.
test-service: .venv/.installed
	$(PIP) --group service-test
	$(PYTEST) tests/rag_demo/service

test-all: test test-slow test-real

# Builds and checks the wheel and the sdist, then tests the wheel in two new environments.
wheel: .venv/.installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python -m tests.support.wheel "" rag,model

# Tests the wheel with each extra, and with all of them. Downloads Ray.
test-wheel: wheel
	$(BIN)/python -m tests.support.wheel

# Pins what the other targets install. UPGRADE=--upgrade raises the versions. There are no hashes
# and no pins of CUDA's packages, because each build of torch has others (CPU, CUDA 12, CUDA 13).
lock: .venv/.installed
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 $(UPGRADE) --no-annotate \
		--custom-compile-command 'make lock' --all-extras $(GROUPS:%=--group %) \
		--output-file constraints.txt pyproject.toml
	sed -i -E '/^(nvidia|cuda)-|^triton=/d' constraints.txt

# Each runs within 150 seconds on a machine with a GPU, in a Python that has torch; .venv is used
# only if it exists.
# RESULTS names the folder for the results, by default benchmarks/results/gpu.
GPU_PYTHON = $(if $(filter command environment,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON)))

test-gpu:
	RESULTS=$(RESULTS) $(GPU_PYTHON) tests/torch_utils/gpu/run.py

# Runs the same tests over a stand-in for CUDA's driver, which can break on demand. ENVIRONMENT names an environment that has
# torch for CUDA, or a folder that keeps the new environment.
test-gpu-stand-in: .venv/.installed
	$(BIN)/python tests/torch_utils/gpu/stand_in/run.py $(ENVIRONMENT)

bench-gpu:
	RESULTS=$(RESULTS) $(GPU_PYTHON) -m benchmarks.gpu

hazards: .venv/.installed
	$(PYTEST) -q tests/torch_utils/hazards

bench-exit: .venv/.installed
	$(BIN)/python -m benchmarks.bench_exit

bench-release: .venv/.installed
	$(BIN)/python -m benchmarks.bench_release
	$(BIN)/python -m benchmarks.charts

bench-clean-exit: .venv/.installed
	$(BIN)/python -m benchmarks.bench_clean_exit
	$(BIN)/python -m benchmarks.bench_clean_exit_lint
	$(BIN)/python -m benchmarks.charts

bench-rag: .venv/.installed
	$(BIN)/python -m benchmarks.bench_rag
	$(BIN)/python -m benchmarks.bench_rag --one-thread
	$(BIN)/python -m benchmarks.bench_open
	$(BIN)/python -m benchmarks.bench_change
	$(BIN)/python -m benchmarks.charts

# BEIR names a folder with corpus.jsonl and queries.jsonl, for example SciFact's.
bench-encode: .venv/.installed
	$(BIN)/python -m benchmarks.bench_encode --beir $(BEIR)

# BEIR as above.
bench-ray: .venv/.ray
	.venv/ray/bin/python -m benchmarks.bench_ray --beir $(BEIR)

# BEIR names a folder with corpus.jsonl, queries.jsonl and qrels/test.tsv.
bench-quality: .venv/.installed
	$(BIN)/python -m benchmarks.bench_quality --beir $(BEIR)

# BEIR names a folder as for bench-quality. Starts a server.
bench-postgres: .venv/.postgres
	.venv/postgres/bin/python -m benchmarks.bench_postgres --beir $(BEIR)

bench-host: .venv/.installed
	$(BIN)/python -m benchmarks.bench_host
	$(BIN)/python -m benchmarks.bench_cycles

torture-save: .venv/.installed
	$(BIN)/python -m tests.rag_demo.durability.saves save 200

fuzz-index: .venv/.installed
	$(BIN)/python -m tests.rag_demo.durability.saves fuzz 20000

# SOAK_S=3600 runs for an hour. SIGTERM arrives in the middle of the load.
soak: .venv/.installed
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.soak_service

# Takes pictures of the service's page, light and dark (apt-get install chromium).
screenshots: .venv/.installed
	$(PIP) --group service-test
	$(BIN)/python -m benchmarks.screenshots

examples: .venv/.installed
	$(PYTEST) -q tests/test_readme.py tests/rag_demo/test_examples.py tests/examples

# The picture in README.md.
recording: .venv/.installed
	$(BIN)/python docs/record.py

# Writes the tables, the help texts and the examples into the pages again.
figures: .venv/.installed
	PYTHONPATH=. $(BIN)/python docs/figures.py

# Builds the site in build/docs, and checks that it loads nothing from other machines.
docs: .venv/.installed
	$(PIP) --group docs
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --nitpicky --quiet --jobs 2 docs build/docs
	! grep --recursive --extended-regexp --include='*.html' --include='*.css' \
		'<(script|img|iframe|source)[^>]* src="?(https?:)?//|<link[^>]* href="?(https?:)?//|url\("?(https?:)?//' \
		build/docs

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict torch_utils clean_exit rag_demo
	$(BIN)/mypy --explicit-package-bases tests
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m clean_exit.lint
	$(BIN)/zizmor --offline --quiet .github
	$(MAKE) --no-print-directory prose

# Checks the English of the documentation, docstrings, comments and messages.
prose: .venv/.installed
	$(BIN)/python docs/prose.py *.md docs torch_utils clean_exit rag_demo tests benchmarks examples

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A Python that is named and too old is refused, even if .venv exists.
ifneq ($(filter command environment,$(origin PYTHON)),)
ifneq ($(FOUND),fine)
$(error this needs Python 3.11 or newer, and $(PYTHON) is $(or $(FOUND),not there): make PYTHON=python3.12 $(or $(MAKECMDGOALS),demo))
endif
endif

.venv/.installed: pyproject.toml constraints.txt
	$(if $(filter fine,$(FOUND)),,$(error this needs Python 3.11 or newer, \
and $(PYTHON) is $(or $(FOUND),not there): make PYTHON=python3.12 $(or $(MAKECMDGOALS),demo)))
	@echo "installing the development environment into .venv; this takes some minutes, once"
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) --group test --group dev --group wheel --group bench -e '.[rag,pdf,model,service,postgres]'
	touch $@

# Installs the packages one by one. test-real skips the tests of those that cannot be installed.
.venv/.corpus: .venv/.installed
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", \
"rb"))["dependency-groups"]["corpus"], sep="\n")' \
	| while read name; do $(PIP) "$$name" || echo "without $$name"; done
	touch $@

# Environments of their own that also see the packages of .venv, each with its dependency group.
FOLDER := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
define environment
	$(BIN)/python -m venv --clear --without-pip .venv/$(1)
	echo "import site; site.addsitedir('$$($(BIN)/python $(FOLDER))')" \
		> "$$(.venv/$(1)/bin/python $(FOLDER))/development.pth"
	$(subst $(BIN),.venv/$(1)/bin,$(PIP)) --group $(1)
endef

.venv/.applications .venv/.postgres .venv/.ray: .venv/.%: .venv/.installed
	$(call environment,$*)
	touch $@

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
