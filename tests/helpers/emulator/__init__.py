"""Runs .cu files on the CPU under CuPy's call signatures: g++ compiles them as they are, a thread is a fiber.

    Emulator() --RawModule(code)--> module --get_function(name)--> kernel --kernel(grid, block, args)-->

Authority: CuPy's reference (https://docs.cupy.dev/en/stable/reference/) for RawModule, RawKernel,
ndarray, Stream, Event, Graph.

Rules of this file:
1. An Emulator takes the place of the module cupy: what uses it takes it as an argument.
2. It is stricter than CuPy: a kernel's arguments must have the number, the types and the memory that its
   signature says. A parameter `weight*`, `packed*` or `table*` is memory that no kernel writes.
3. Work put on a stream is done when the host waits for it, and no sooner: as late as a GPU might do it.
4. Memory that has not been written is NaN.

Not here: the machine (cuda.h, machine.cpp, checker.h); time, which has nothing to do with a GPU's.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from devices.kernels import Parameter, signatures

HERE = Path(__file__).parent
MISSING = None  # why it cannot run: the fibers are switched by x86-64's instructions
if not shutil.which("g++") or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    MISSING = "the emulator needs g++ on Linux and x86-64"

LAUNCHING = threading.Lock()
STACKS = (ctypes.c_char * (1024 * (64 << 10)))()  # of a block's threads, for each launch the same
FLAGS = ["-std=c++17", "-fPIC", "-w", "-march=native", "-ffp-contract=off", "-I."]  # for g++ in HERE

SCALARS: dict[str, Any] = {"int": ctypes.c_int32, "float": ctypes.c_float}
# the types of an array, seen from Python
ITEMS = {"float": "f4", "int": "i4", "unsigned": "u4", "u64": "u8", "float2": "c8", "bf16": "u2",
         "weight": "u2", "table": "i4", "packed": "u1"}  # fmt: skip
CONSTANT = "weight", "table", "packed"


def build(code: str, options: Sequence[str], check: bool) -> Path:
    """Return the shared library that the text of a .cu file makes."""
    preprocess = ["g++", "-E", "-fdirectives-only", "-P", "-I.", *options, "-x", "c++", "-"]
    chosen = subprocess.run(preprocess, cwd=HERE, input=code, capture_output=True, text=True)
    names = signatures(chosen.stdout)  # those that the options leave
    calls = ""
    for name, (_, parameters) in names.items():
        given = ", ".join(f"*({p.kind} {'*' * p.is_array}*)a[{i}]" for i, p in enumerate(parameters))
        call = f"{{ {name}({given}); }}"
        calls += f'extern "C" __attribute__((no_sanitize("thread"))) void launch_{name}(void **a) {call}\n'
    code = re.sub(r'extern\s+"C"\s+(?=__global__)', "", code)
    # In a namespace without a name: else what is shared in a template would be put elsewhere.
    text = f'#include "cuda.h"\nnamespace {{\n#line 1 "kernels.cu"\n{code}\n}}\n{calls}'
    watch = ["-g1", "-O1", "-fsanitize=thread,alignment"] if check else ["-O2"]
    # Shared memory is a section of its own, which can be poisoned; g++ would not hear of it within templates.
    compile_ = ["g++", *FLAGS, *options, *watch, "-c", "-x", "c++", "-"]
    shared = ["objcopy", "--rename-section", ".bss=cuda_shared"]
    kernels = made(text, ".o", compile_, shared)
    checker = ["-DCHECKER"] if check else []
    machine = (HERE / "machine.cpp").read_text()
    host = made(machine, ".o", ["g++", *FLAGS, "-O2", "-mno-red-zone", *checker, "-c", "-x", "c++", "-"])
    # -Bsymbolic: or a kernel called `step` would be glibc's
    return made("", ".so", ["g++", "-shared", "-Wl,-Bsymbolic", str(host), str(kernels)])


def made(text: str, suffix: str, command: list[str], after: Sequence[str] = ()) -> Path:
    """Return what g++ makes of a text. It is kept under a hash of all that it depends on.

    Other processes that need the same one wait for it.
    """
    from filelock import FileLock  # here: tests/gpu runs where it is not installed

    headers = "".join((HERE / name).read_text() for name in ("cuda.h", "cuda_bf16.h", "checker.h"))
    key = hashlib.sha256("\0".join([text, headers, *command, *after]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"emulator-{os.getuid()}"
    file = folder / (key + suffix)
    folder.mkdir(exist_ok=True)
    with FileLock(folder / f"{key}.lock"):
        if not file.exists():
            unfinished = file.with_suffix(".unfinished")
            subprocess.run([*command, "-o", str(unfinished)], cwd=HERE, input=text, text=True, check=True)
            if after:
                subprocess.run([*after, str(unfinished)], check=True)
            unfinished.replace(file)
    return file


# --- memory -------------------------------------------------------------------------------------------------


class Array(np.ndarray[Any, Any]):
    """cupy.ndarray, as far as it is used: memory of the device, which the host copies from and to."""

    emulator: "Emulator"

    def __array_finalize__(self, obj: Any) -> None:
        self.emulator = getattr(obj, "emulator", None)  # type: ignore[assignment]

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def set(self, host: Any, stream: "Stream | None" = None) -> None:
        assert type(host) is np.ndarray, "set() copies from the host's memory"
        assert (host.shape, host.dtype) == (self.shape, self.dtype), "set() wants the same shape and dtype"
        self.emulator.submit(lambda: np.copyto(self.view(np.ndarray), host), stream)
        if stream is None:
            self.emulator.current.synchronize()

    def get(self, stream: "Stream | None" = None, out: Any = None, blocking: bool = True) -> Any:
        host = np.empty(self.shape, self.dtype) if out is None else out
        self.emulator.submit(lambda: np.copyto(host, self.view(np.ndarray)), stream)
        if blocking:
            (stream or self.emulator.current).synchronize()
        return host


# --- streams ------------------------------------------------------------------------------------------------


class Stream:
    """A queue of work, done when the host waits for it."""

    def __init__(self, emulator: "Emulator") -> None:
        self.emulator = emulator
        self.recording: list[Callable[[], None]] | None = None
        self.queue: list[Callable[[], None]] = []
        self.n_done = 0

    def __enter__(self) -> "Stream":
        self.outer, self.emulator.current = self.emulator.current, self
        return self

    def __exit__(self, *error: object) -> None:
        self.emulator.current = self.outer

    def synchronize(self) -> None:
        self.run_until(self.n_done + len(self.queue))

    def run_until(self, n_done: int) -> None:
        while self.n_done < n_done:
            self.n_done += 1
            self.queue.pop(0)()

    def begin_capture(self) -> None:
        self.recording = []

    def end_capture(self) -> SimpleNamespace:
        """Return a graph: its launch() submits the work that was recorded."""
        recorded, self.recording = self.recording or [], None

        def launch(stream: "Stream | None" = None) -> None:
            for work in recorded:
                self.emulator.submit(work, stream)

        return SimpleNamespace(launch=launch)


class Event:
    def __init__(self, emulator: "Emulator") -> None:
        self.emulator = emulator

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.emulator.current
        self.mark = self.stream.n_done + len(self.stream.queue)

    def synchronize(self) -> None:
        self.stream.run_until(self.mark)


# --- kernels ------------------------------------------------------------------------------------------------


class Module:
    """cupy.RawModule of one .cu file: compiled when it is first needed."""

    def __init__(self, emulator: "Emulator", code: str, options: Sequence[str]) -> None:
        self.emulator, self.code = emulator, code
        self.defines = [option for option in options if option.startswith("-D")]
        self.signatures = signatures(code)

    @cached_property
    def library(self) -> Any:
        library = ctypes.CDLL(str(build(self.code, self.defines, self.emulator.check)))
        library.emulator_launch.restype = ctypes.c_char_p
        return library

    def get_function(self, name: str) -> "Kernel":
        return Kernel(self, name, self.signatures[name][1])


class Kernel:
    """cupy.RawKernel."""

    def __init__(self, module: Module, name: str, parameters: list[Parameter]) -> None:
        self.module, self.name, self.parameters = module, name, parameters
        self.emulator = module.emulator
        self.emulator.kernels.append(self)

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        assert len(args) == len(self.parameters), self.name
        packed = [self.pack(p, arg) for p, arg in zip(self.parameters, args, strict=True)]
        self.submit(grid, block, packed)

    def pack(self, parameter: Parameter, value: Any) -> Any:
        """Return the bytes that CUDA would copy. CuPy takes any type; here it must be the parameter's."""
        what = f"{self.name}: {parameter}: {type(value).__name__}"
        if not parameter.is_array:
            assert type(value) is (np.int32 if parameter.kind == "int" else np.float32), what
            return SCALARS[parameter.kind](value)
        if isinstance(value, np.uintp) and value == 0:
            return ctypes.c_void_p(0)
        assert isinstance(value, Array), what
        assert value.dtype == np.dtype(ITEMS[parameter.kind]), f"{what} of {value.dtype}"
        assert value.flags.c_contiguous, what
        return ctypes.c_void_p(value.ctypes.data)

    def submit(self, grid: Sequence[int], block: Sequence[int], packed: list[Any]) -> None:
        """packed: a ctypes value a parameter, which CUDA copies at the launch."""
        sizes = [(ctypes.c_uint * 3)(*(*size, 1, 1)[:3]) for size in (grid, block)]
        assert all(n > 0 for size in sizes for n in size), (self.name, grid, block)
        pointers = (ctypes.c_void_p * len(packed))(*[ctypes.addressof(value) for value in packed])
        given = [(p, value.value) for p, value in zip(self.parameters, packed, strict=True) if p.is_array]
        arrays = [(p, self.emulator.memory_at(address)) for p, address in given if address]
        table = [n for p, (_, begin, n_bytes) in arrays for n in (begin, n_bytes, p.kind in CONSTANT)]
        self.emulator.n_launches += 1

        def work(keep: Any = (packed, arrays)) -> None:
            library = self.module.library
            if self.emulator.check:
                library.emulator_arrays((ctypes.c_size_t * len(table))(*table), len(arrays))
            launch = getattr(library, f"launch_{self.name}")
            with LAUNCHING:
                error = library.emulator_launch(launch, pointers, *sizes, self.emulator.order, STACKS)
            if error:
                raise RuntimeError(f"{self.name}: {self.with_line(error.decode())}")

        self.emulator.submit(work)

    def with_line(self, message: str) -> str:
        """Put the line of the .cu file into a message of the checker that has an address of the code."""
        code = re.search("code (0x[0-9a-f]+)", message)
        if not code:
            return message
        command = ["addr2line", "-i", "-e", self.module.library._name, code[1]]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.split()
        places = [line.rpartition("/")[2] for line in lines if ".cu:" in line]
        return message.replace(code[0], " in ".join(places))


# --- the whole ----------------------------------------------------------------------------------------------


PROPERTIES = {"name": b"the emulator", "multiProcessorCount": 2}


class Emulator:
    """The module `cupy`, as far as it is used.

    order: 0 runs threads and blocks first to last, 1 last to first, others in an order of their own.
    check: with the checker, about ten times slower.
    memory: bytes that the device has.
    """

    __version__ = "14.0.0"

    def __init__(self, order: int = 0, check: bool = False, memory: int = 1 << 30) -> None:
        self.order, self.check = order, check
        self.free = self.total = memory
        self.n_launches = 0
        self.kernels: list[Kernel] = []
        self.allocated: list[tuple[weakref.ref[Any], int, int]] = []  # memory, begin, bytes
        self.current = Stream(self)
        self.cuda = SimpleNamespace(
            Stream=lambda non_blocking=False: Stream(self),
            Event=lambda disable_timing=False: Event(self),
            Device=lambda: SimpleNamespace(mem_info=(self.free, self.total), compute_capability="90"),
            get_current_stream=lambda: self.current,
            alloc_pinned_memory=lambda n_bytes: bytearray(b"\xff" * n_bytes),
            runtime=SimpleNamespace(
                getDeviceProperties=lambda i: PROPERTIES,
                driverGetVersion=lambda: 13000,
            ),
        )

    def RawModule(self, *, code: str, options: Sequence[str] = ()) -> Module:
        return Module(self, code, options)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        n_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        assert n_bytes <= self.free
        self.free -= n_bytes
        flat = np.full(n_bytes + 512, 0xFF, np.uint8)  # CuPy's memory begins at multiples of 512
        skip = -flat.ctypes.data % 512
        array: Array = flat[skip : skip + n_bytes].view(dtype).reshape(shape).view(Array)
        array.emulator = self
        self.allocated.append((weakref.ref(flat), array.ctypes.data, n_bytes))
        return array

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        return self.asarray(np.zeros(shape, dtype))

    def asarray(self, host: Any) -> Array:
        array = self.empty(host.shape, host.dtype)
        array.view(np.ndarray)[...] = host
        return array

    def memory_at(self, address: int) -> tuple[Any, int, int]:
        """Return the allocation that an address lies in: its memory, begin and bytes."""
        for reference, begin, n_bytes in self.allocated:
            memory = reference()
            if memory is not None and begin <= address < begin + n_bytes:
                return memory, begin, n_bytes
        raise ValueError(f"{address:#x} is no memory of the device")

    def submit(self, work: Callable[[], None], stream: Stream | None = None) -> None:
        stream = stream or self.current
        (stream.queue if stream.recording is None else stream.recording).append(work)
