"""Patience by the load of the machine: what other work on it takes does not count."""

import os

# How many processes want each core, at least one: everything takes so many times as long.
SLOWNESS = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
# For what takes milliseconds on a quiet machine: load may come later. Mutants that hang must not take long.
PATIENCE_S = float(os.environ.get("PATIENCE_S", "120")) * SLOWNESS
