check: lint test

lint:
	ruff format --check
	ruff check
	mypy

test:
	pytest

mutants:
	python tests/mutants.py

.PHONY: check lint test mutants
