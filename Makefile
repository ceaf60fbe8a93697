# `make demo` and `make test` set up all they need in .venv; nothing else is written outside
# this folder but the package manager's cache.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# The packaged model is a local folder: nothing has to be looked up on a hub.
export HF_HUB_OFFLINE := 1

.PHONY: demo test hazards lint format bench-exit bench-release bench-clean-exit bench-rag bench-encode bench-unload bench-start bench-quality torture-save fuzz-index examples clean

# Threads that wait for each other sleep instead of spinning: a busy machine gets there sooner.
demo: .venv/.installed
	OMP_WAIT_POLICY=PASSIVE $(BIN)/clean-exit --max-shutdown 10 -- $(BIN)/rag-demo demo --progress terminal

test: .venv/.installed
	$(BIN)/python -m pytest -n 2 --dist loadgroup

hazards: .venv/.installed
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup tests/hazards

bench-exit: .venv/.installed
	$(BIN)/python benchmarks/bench_exit.py
	$(BIN)/python benchmarks/bench_resource.py

bench-release: .venv/.installed
	$(BIN)/python benchmarks/bench_release.py
	$(BIN)/python benchmarks/plot_memory.py

bench-clean-exit: .venv/.installed
	$(BIN)/python benchmarks/bench_clean_exit.py

bench-rag: .venv/.installed
	$(BIN)/python benchmarks/bench_rag.py
	$(BIN)/python benchmarks/bench_open.py

# BEIR names a folder with corpus.jsonl and queries.jsonl, such as that of SciFact.
bench-encode: .venv/.installed
	$(BIN)/python benchmarks/bench_encode.py $(if $(BEIR),--beir $(BEIR))

bench-unload: .venv/.installed
	$(BIN)/python benchmarks/bench_unload.py

bench-start: .venv/.installed
	$(BIN)/python benchmarks/bench_start.py

# BEIR names a folder with corpus.jsonl, queries.jsonl and qrels/test.tsv.
bench-quality: .venv/.installed
	$(BIN)/python benchmarks/bench_quality.py --beir $(BEIR)

torture-save: .venv/.installed
	$(BIN)/python tests/rag_demo/torture.py save 200

fuzz-index: .venv/.installed
	$(BIN)/python tests/rag_demo/torture.py fuzz 100000

examples: .venv/.installed
	$(BIN)/python -m pytest -q -n 2 tests/test_readme.py

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict torch_utils rag_demo

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[rag,model,test,dev,bench]'
	touch $@

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
