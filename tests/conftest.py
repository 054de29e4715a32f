"""Settings of the suite: one BLAS thread, for two collapse on a busy machine, and no unseeded randomness.

Who asks for tests/gpu by name wants them run: a machine without a GPU is an error then, not dozens of skips.
"""

import os
from pathlib import Path

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # before NumPy is imported

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("suite", derandomize=True, deadline=None, database=None)
settings.load_profile("suite")

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_configure(config: pytest.Config) -> None:
    paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if not any(path.is_relative_to(GPU_TESTS) for path in paths):
        return
    from devices import cuda

    if reason := cuda.missing():
        raise pytest.UsageError(f"tests/gpu is for a GPU: {reason}")
