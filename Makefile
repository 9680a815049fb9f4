# make demo   install, then train on real text with two processes, stop, resume, plot
# make test   install, then lint, type-check and run the suite
# make venv   install only; .venv/bin/python is the interpreter it leaves behind

PYTHON ?= python3
PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1

.PHONY: demo test venv lint fast clean

venv: .venv/.installed

# Re-made when what is to be installed changes, and only then.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("smp-train needs Python 3.10 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools wheel
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: venv
	$(PY) launchers/local/demo.py

lint: venv
	$(PY) -m ruff check .
	$(PY) -m mypy

test: lint
	$(PY) -m pytest

fast: venv
	$(PY) -m pytest -m 'not slow and not system'

clean:
	rm -rf .venv build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
