"""What bench.py measures, a module each."""
