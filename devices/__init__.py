"""The ops of model.py at speed: Numba on a CPU, CUDA on a GPU."""
