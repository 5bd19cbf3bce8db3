# Two commands set everything up: `make demo` and `make test`. Both make the environment in .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow lint bench clean

demo: $(READY)
	$(BIN)/outrider demo
	$(BIN)/outrider demo -d eagle3-smollm2 -o shape=tree --draft 16 --only 4

test: $(READY) lint
	$(BIN)/outrider models get smollm2
	$(BIN)/python -m pytest -m "not slow"

slow: $(READY)
	$(BIN)/python -m pytest -m slow -s

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/run.py $(ARGS)

# torch goes first and by itself: the release is pinned, so pip takes the build that fits this machine.
$(READY): pyproject.toml requirements.lock setup.py $(wildcard outrider/kernels/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements.lock)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
