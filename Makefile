# Commands for a working copy, with the tools of .venv where there is one.
ifneq ($(wildcard .venv/bin/python),)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
endif

.PHONY: check lint test docs ci nightly
check: lint test

lint:
	ruff format --check .
	ruff check .
	pyright --pythonpath "$$(command -v python)"

test:
	python -m pytest -q -n 3

docs:
	sphinx-build -q -W --keep-going -c docs . docs/_build/html

ci:
	.ci/run

nightly:
	.ci/nightly
