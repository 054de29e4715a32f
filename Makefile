check: lint test

lint:
	ruff format --check
	ruff check
	mypy

test:
	EXAMPLES=100 pytest -m ""  # with the sweep

mutants:
	python tests/mutants.py

# The audit as one file: Python 3.11 or later runs it, with nothing installed.
audit.pyz:
	rm -rf build/audit.pyz
	mkdir -p build/audit.pyz
	cp -R audit build/audit.pyz
	rm -rf build/audit.pyz/audit/__pycache__
	printf 'import sys\n\nfrom audit.__main__ import main\n\nsys.exit(main())\n' > build/audit.pyz/__main__.py
	python -m zipapp --compress --python '/usr/bin/env python3' --output llmref-audit.pyz build/audit.pyz

.PHONY: check lint test mutants audit.pyz
