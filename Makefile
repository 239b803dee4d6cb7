# make train                        the default run, on a virtual mesh of CPU devices
# make train ARGS="--steps 50"      with options (see python -m train --help)
# make test [ARGS="-m 'not slow and not exhaustive'"]   what proves a change
# make test-all                      the exhaustive tests too; both take WORKERS=4
# make lint | format | clean
#
# All but clean first make .venv with the first suitable Python they find
# (PYTHON=... chooses another) and install this project into it, once.

SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# A name that exists may still not run (pyenv leaves such), so each is tried.
PYTHON ?= $(firstword $(foreach python,python3.11 python3.12 python3.13 python3,\
	$(shell $(python) -c '$(SUITABLE)' >/dev/null 2>&1 && echo $(python))))
INSTALLED := .venv/.installed
# Processes that share the tests: a gigabyte and a core each.
WORKERS ?= 2

.PHONY: train test test-all lint format clean

train: $(INSTALLED)
	.venv/bin/python -m train $(ARGS)

# A file's tests stay together: they share what was compiled for them.
PYTEST := .venv/bin/python -m pytest tests -n $(WORKERS) --dist loadfile

test: $(INSTALLED)
	$(PYTEST) -m "not exhaustive" $(ARGS)

test-all: $(INSTALLED)
	$(PYTEST) $(ARGS)

lint: $(INSTALLED)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: $(INSTALLED)
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): setup.py
	@test -n "$(PYTHON)" || { \
	  echo "No Python 3.11, 3.12 or 3.13 with venv found (torch_xla 2.9 has wheels for these)."; \
	  echo "Install one (Debian: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python $(MAKECMDGOALS)"; \
	  exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@
