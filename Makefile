check: lint test

lint:
	ruff format --check
	ruff check
	mypy

test:
	pytest

.PHONY: check lint test
