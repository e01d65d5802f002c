# Everything is set up by the targets themselves; a second run reuses what is there.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
# Debian packages, each for: bubblewrap the sandbox; libibverbs1 libnuma1 libcurl4 Mooncake's shared library; libgomp1 torch; chromium the UI tests.
APT_PACKAGES := bubblewrap libibverbs1 libnuma1 libcurl4 libgomp1
# Where PyPI's own torch is a CUDA build, ask for the CPU one: make PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint test-claude test-slow clean

setup: $(STAMP)

$(STAMP): requirements/cpu.lock pyproject.toml
	@missing=""; for p in $(APT_PACKAGES); do dpkg -s $$p >/dev/null 2>&1 || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then echo "installing Debian packages:$$missing"; \
	  $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq --no-install-recommends $$missing >/dev/null; fi
	@[ -x $(PY) ] || python3.11 -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check --no-deps $(PIP_FLAGS) -r requirements/build.lock
	$(PY) -m pip install -q --disable-pip-version-check --no-deps $(PIP_FLAGS) -r requirements/cpu.lock
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(VENV)/bin/python -m compileall -q $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

demo: setup
	$(VENV)/bin/gyre demo

test: setup lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -q --durations=15

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check -q .
	$(VENV)/bin/mypy

# The tests that take minutes each.
test-slow: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m slow

# Drives the real Claude Code CLI through the proxy (needs npm).
test-claude: setup
	mkdir -p .claude-code && cd .claude-code && npm install --silent --no-fund --no-audit @anthropic-ai/claude-code@2.1.220
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m claude

clean:
	rm -rf $(VENV) .claude-code .pytest_cache .ruff_cache .mypy_cache .hypothesis
