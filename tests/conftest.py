"""Settings of the suite: one BLAS thread, for two collapse on a busy machine, and no unseeded randomness."""

import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # before NumPy is imported

from hypothesis import settings  # noqa: E402

settings.register_profile("suite", derandomize=True, deadline=None, database=None)
settings.load_profile("suite")
