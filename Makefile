# Every target makes the virtual environment when it is missing. ARGS= is passed through:
#   make demo ARGS="--json out.json"      make test ARGS="-k greedy -x"
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
CLIENTS := $(VENV)-clients
# What pip fetches is shown, a line a wheel; without pipefail its failure would be lost behind sed.
SHELL := /bin/bash -o pipefail
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
SHORTLY := | sed -u -nE 's/^ +(Downloading|Using cached) (.*\.whl \(.*)/  \2/p; s/^Installing coll.*/  unpacking …/p'

.PHONY: help venv demo test test-all test-reference test-clients lint format bench head figures deb clean
help:
	@echo "make demo            both ends on this machine, real weights (ARGS='--json out.json')"
	@echo "make test            the tests, without torch (ARGS='-n 2 -k greedy -x tests/wire': -n"
	@echo "                     processes; the rest goes to pytest. ARGS=--record: how long files take)"
	@echo "make test-all        those that take long too, and test-reference"
	@echo "make test-reference  parity with transformers; installs torch"
	@echo "make test-clients    clients of other projects (openai, anthropic, litellm, lm-eval, …) against"
	@echo "                     a service of this checkout; installs them into $(VENV)-clients"
	@echo "make lint            ruff, mypy --strict, import-linter, words"
	@echo "make deb             the edge as a Debian package (ARGS='--python 3.12 --machine aarch64')"
	@echo "make bench           every benchmark (ARGS='--quick'); figures go to bench-*.json"
	@echo "make head            make the decision head of the package anew; installs torch"
	@echo "make figures         the same, and measure the papers' figures for the package"
	@echo "                     (PAPERS=tslt ARGS=figure4: these only, without the head)"

venv: $(VENV)/.installed

$(BIN)/python:
	@echo "making $(VENV) …"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what the demo needs into $(VENV) (66 MB of wheels) …"
	@$(INSTALL) -e '.[cpu,export,serve]' $(SHORTLY)
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what tests and development need into $(VENV) (1.2 GB on disk) …"
	@$(INSTALL) -e '.[cpu,export,serve,bundle,ray,field,table,traces,dev]' $(SHORTLY)
	@$(INSTALL) -q --only-binary llama-cpp-python -e '.[llamacpp]' >/dev/null 2>&1 || \
		echo "pip has no wheel of llama.cpp for this machine: its tests will skip"
	@$(INSTALL) -q --only-binary tensorrt-rtx-cu12-libs,tensorrt-rtx-cu12-bindings -e '.[tensorrt-rtx]' >/dev/null 2>&1 || \
		echo "pip has no wheels of NVIDIA's builder of engines: its tests will skip"
	@touch $(VENV)/.demo $@

$(VENV)/.reference: $(VENV)/.installed
	@echo "installing torch and transformers into $(VENV) …"
	@$(INSTALL) -e '.[reference]' $(SHORTLY)
	@touch $@

$(VENV)/.judge: $(VENV)/.installed
	@echo "installing torch into $(VENV) …"
	@$(INSTALL) -e '.[judge]' $(SHORTLY)
	@touch $@

# Without a network the clients' tests skip; the next run tries again.
$(CLIENTS)/.installed: $(addprefix tests/clients/,requirements.txt constraints.txt package.json package-lock.json)
	@echo "installing clients of other projects into $(CLIENTS) (1.5 GB on disk) …"
	@$(PYTHON) -m venv $(CLIENTS)
	@cp tests/clients/package.json tests/clients/package-lock.json $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -q -r tests/clients/requirements.txt \
		-c tests/clients/constraints.txt && npm ci --prefix $(CLIENTS) --no-audit --no-fund --silent \
		&& touch $@ || echo "not all clients can be had here: the tests of those that lack will skip"

demo: $(VENV)/.demo
	@$(BIN)/python -m pilotfish demo $(ARGS)

test: venv
	@$(BIN)/python -m tests $(ARGS)

test-all: venv
	@$(BIN)/python -m tests --all $(ARGS)
	@$(MAKE) --no-print-directory test-reference

test-reference: $(VENV)/.reference
	@$(BIN)/python -m tests --reference $(ARGS)

test-clients: venv $(CLIENTS)/.installed
	@timeout --foreground --kill-after 20 360 $(BIN)/python -m tests --clients $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.words

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The same commit makes the same package.
deb: venv
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} \
		$(BIN)/python -m pilotfish.deploy.deb $(ARGS)

# Without channels, which needs a decision head and questions, paths and rates, which need root, and
# when, which draws a picture.
bench: venv
	@for script in $(filter-out %/channels.py %/when.py %/paths.py %/rates.py,$(sort $(wildcard benchmarks/[a-z]*.py))); do \
		echo "== $$script"; \
		$(BIN)/python $$script --json bench-$$(basename $$script .py).json $(ARGS) || exit 1; \
	done

# Makes the head by the commands of docs/wisv.md. An interrupted run continues; `make clean` starts
# anew.
JUDGE := $(abspath $(BIN))/python -m pilotfish judge
HEADS := pilotfish/edge_runtime/heads
head: $(VENV)/.judge
	@mkdir -p build/head && cd build/head && set -ex; \
	$(JUDGE) questions --set train --count 300 --out train.jsonl; \
	$(JUDGE) questions --set dev --count 60 --out dev.jsonl; \
	$(JUDGE) questions --set test --count 500 --out test.jsonl; \
	$(JUDGE) mine --draft default-28 --target default --questions train.jsonl --task facts --right-only \
	    --max-tokens 64 --context 256 --slots 16 --out mined; \
	$(JUDGE) mine --draft default-28 --target default --questions dev.jsonl --task facts \
	    --max-tokens 64 --context 256 --slots 16 --out mined-dev; \
	$(JUDGE) train mined --out heads/default; \
	$(JUDGE) sweep --draft default-28 --target default --head heads/default --questions test.jsonl --task facts \
	    --windows 8 --links 20:50 --thresholds 0.4295989117420986,0.49317009472733464 --max-tokens 64 --slots 16 \
	    --mined mined-dev --out sweep.jsonl --update-head
	@cp build/head/heads/default.json build/head/heads/default.safetensors $(HEADS)

# Measures the figures with each paper's default pair into the package. An interrupted run continues.
ifdef PAPERS
figures: venv
else
PAPERS := tslt dssd specfed decentralized wisv
figures: head
endif
	@for paper in $(PAPERS); do \
		$(BIN)/python -m pilotfish field paper $$paper $(ARGS) --run \
			--save pilotfish/lab/field/papers/measured || exit 1; \
	done

clean:
	rm -rf $(VENV) $(CLIENTS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
