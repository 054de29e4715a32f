check: lint test

lint:
	ruff format --check
	ruff check
	mypy

test:
	EXAMPLES=100 pytest -m ""  # with the sweep

mutants:
	python tests/mutants.py

# All that a GPU is needed for, each in less than ten minutes: is it right, and how fast? An 8B; memcheck,
# racecheck. `make -k` goes on after a failure. Each line is a process of its own, for an error of CUDA spoils
# the process that it comes in.
gpu-1: gpu-tests gpu-speed
gpu-2:
	python bench.py gpu --model qwen3-8b
gpu-3: gpu-memcheck gpu-racecheck
gpu-tests:
	pytest -q -rs tests/gpu -k 'not sanitizer'
gpu-speed:
	python bench.py gpu
gpu-memcheck gpu-racecheck:
	pytest -q -rs tests/gpu -k $(@:gpu-%=%)

# The audit as one file: Python 3.11 or later runs it, with nothing installed.
audit.pyz:
	rm -rf build/audit.pyz
	mkdir -p build/audit.pyz
	cp -R audit build/audit.pyz
	rm -rf build/audit.pyz/audit/__pycache__
	printf 'import sys\n\nfrom audit.__main__ import main\n\nsys.exit(main())\n' > build/audit.pyz/__main__.py
	python -m zipapp --compress --python '/usr/bin/env python3' --output llmref-audit.pyz build/audit.pyz

.PHONY: check lint test mutants audit.pyz gpu-1 gpu-2 gpu-3 gpu-tests gpu-speed gpu-memcheck gpu-racecheck
