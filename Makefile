# Each target installs what it needs into .venv. Outside of this folder, only the package
# manager's cache is written. CONTRIBUTING.md names the commands that are not here.

# The first of these that is new enough.
PYTHON ?= $(or $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done),python3)
TOO_OLD := import sys; sys.exit(sys.version_info < (3, 11) and \
	"this needs Python 3.11 or newer: make PYTHON=python3.12")
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Four workers on two cores, because many tests wait for a program to end. tests/conftest.py sets
# the order.
PYTEST := $(BIN)/python -m pytest -n 4 --no-loadscope-reorder --dist loadgroup $(PYTEST_OPTIONS)
# The packaged model is a local folder, so no test needs a model hub.
export HF_HUB_OFFLINE := 1

# Two test runs at once would compete for the cores.
.NOTPARALLEL:
.PHONY: help demo test test-slow test-versions test-gpu bench bench-gpu lint docs wheel clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

# Waiting threads sleep instead of spinning, which is faster on a busy machine.
demo: .venv/.installed ## index the documentation, search it, and release the model
	OMP_WAIT_POLICY=PASSIVE $(BIN)/clean-exit --max-shutdown 10 -- $(BIN)/rag-demo demo docs

test: .venv/.installed ## run the quick tests
	$(PYTEST) -m "not slow"

test-slow: .venv/.installed .venv/.applications ## run the long tests and the variations
	$(PYTEST) -m "slow and not real"

# ROWS="oldest newest" runs these rows only; tests/support/versions.py has all of them.
test-versions: .venv/.installed ## run the tests with other versions of Python and packages; downloads gigabytes
	$(BIN)/python -m tests.support.versions $(ROWS)

# PYTHON names a Python that has torch; .venv is used if it exists, and nothing is installed.
GPU_PYTHON = $(if $(filter command environment,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON)))

test-gpu: ## run the tests that need a GPU, within 150 s; see docs/gpu.md
	RESULTS=$(RESULTS) $(GPU_PYTHON) tests/torch_utils/gpu/run.py

bench-gpu: ## measure on a GPU, within 150 s
	RESULTS=$(RESULTS) $(GPU_PYTHON) -m benchmarks.gpu

bench: .venv/.installed ## measure again, and draw the charts; takes about an hour
	for name in exit release clean_exit open change host cycles arenas rag "rag --one-thread"; do \
		$(BIN)/python -m benchmarks.bench_$$name || exit 1; done
	$(BIN)/python -m benchmarks.charts

bench-%: .venv/.installed ## measure one part, such as bench-release
	$(BIN)/python -m benchmarks.bench_$*

lint: .venv/.linters ## run the linters and type checkers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict torch_utils clean_exit rag_demo torch_cleanup_pytest.py
	$(BIN)/mypy --explicit-package-bases tests
	PATH="$(CURDIR)/$(BIN):$$PATH" pyright --verifytypes torch_utils --ignoreexternal
	PATH="$(CURDIR)/$(BIN):$$PATH" pyright --verifytypes clean_exit --ignoreexternal
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m clean_exit.lint
	$(BIN)/zizmor --offline --quiet .github

# A page that loads something from another machine is refused.
docs: .venv/.installed ## build the documentation in build/docs
	$(PIP) --group docs
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --nitpicky --quiet --jobs 2 docs build/docs
	! grep --recursive --extended-regexp --include='*.html' --include='*.css' \
		'<(script|img|iframe|source)[^>]* src="?(https?:)?//|<link[^>]* href="?(https?:)?//|url\("?(https?:)?//' \
		build/docs

wheel: .venv/.installed ## build the wheel and the sdist, and test the wheel in two new environments
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python -m tests.support.wheel "" rag,model

clean: ## remove .venv and everything that was built
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(TOO_OLD)'
	@echo "installing the development environment into .venv; this takes some minutes, once"
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) --group test --group dev --group wheel --group bench -e '.[rag,pdf,model,service,postgres]'
	touch $@

# A part of what .installed installs, without models and clients.
.venv/.linters: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(TOO_OLD)'
	test -f .venv/.installed || { $(PYTHON) -m venv .venv && $(PIP) --upgrade pip && \
		$(PIP) --group lint -e '.[service]'; }
	touch $@

# Programs of other packages, one by one. Tests of those that cannot be installed are skipped.
.venv/.corpus: .venv/.installed
	$(BIN)/python -c 'import tomllib; groups = tomllib.load(open("pyproject.toml", \
"rb"))["dependency-groups"]; print(*groups["corpus"], *groups["frameworks"], sep="\n")' \
	| while read name; do $(PIP) "$$name" || echo "without $$name"; done
	touch $@

# Environments of their own that also see the packages of .venv, each with its dependency group.
FOLDER := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.venv/.applications .venv/.postgres .venv/.ray: .venv/.%: .venv/.installed
	$(BIN)/python -m venv --clear --without-pip .venv/$*
	echo "import site; site.addsitedir('$$($(BIN)/python $(FOLDER))')" \
		> "$$(.venv/$*/bin/python $(FOLDER))/development.pth"
	$(subst $(BIN),.venv/$*/bin,$(PIP)) --group $*
	touch $@
