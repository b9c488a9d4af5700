"""Triton support: devices that Triton runs on, kernel launches and parallel compilation.

Triton compiles a kernel at its first launch, which takes about a second; a training step launches some twenty kernels.
`compile_in_parallel` traces a step without launching anything and compiles all of its kernels in threads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


@functools.cache
def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and the device is a CUDA GPU with bfloat16 and TF32 (compute capability 8.0).

    Example:
        >>> triton_runs_on(torch.device("cpu"))
        False
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if importlib.util.find_spec("triton.tools.tensor_descriptor") is None:  # before Triton 3.4
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def interpreting() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on the CPU for tests (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def can_launch(device: torch.device) -> bool:
    """Whether kernels can be launched on tensors of this device: CUDA, or the CPU with Triton's interpreter."""
    return device.type == "cuda" or (device.type == "cpu" and interpreting())


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors of a GPU; 4 for the interpreter."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use, from 99 KiB (8.6, 8.9) to 227 (9.0), as for the interpreter."""
    if device.type == "cpu":
        return 227 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


_compilation: _Compilation | None = None  # global, not per thread: autograd runs backward in a thread of its own


def only_compiling() -> bool:
    """Whether kernels are compiled and not launched, inside `compile_in_parallel`, so that values mean nothing.

    Example:
        >>> with compile_in_parallel():
        ...     only_compiling()
        True
    """
    return _compilation is not None


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """A function that launches the kernel, or only compiles it inside `compile_in_parallel`.

    Its positional arguments are those of the kernel that vary, its keywords constants of the compilation. The first
    call with arguments of some types goes through Triton, later ones through a `CachedLaunch`.

    Example:
        >>> class Kernel:
        ...     def __getitem__(self, grid):
        ...         return lambda value, SIZE, num_warps: print(grid, value, SIZE)
        >>> launch(Kernel(), (4,))("x", SIZE=16, num_warps=4)
        (4, 1, 1) x 16
    """
    if _compilation is not None:
        return functools.partial(_compilation.submit, kernel, grid)
    x, y, z, *_ = *grid, 1, 1
    return functools.partial(_launch, kernel, (x, y, z))


_launches: dict[Hashable, CachedLaunch] = {}
_MOST_LAUNCHES = 1024  # that are kept, for batches of changing sizes


def _launch(kernel: Any, grid: tuple[int, int, int], *arguments: Any, **settings: Any) -> None:
    key = (kernel, grid, tuple(map(_specialisation, arguments)), tuple(settings.items()))
    found = _launches.get(key)
    if found is None:
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        found = _launches[key] = CachedLaunch(kernel, grid, **settings)
    found(*arguments)


class CachedLaunch:
    """A kernel with its grid and settings, for calls whose arguments agree in all that Triton specialises a kernel on.

    The first call goes through Triton, which inspects every argument to select a compiled kernel, in some 20 to 60
    microseconds. Later calls launch that kernel directly. So tensors must have the same type, device and alignment,
    and integers agree in being 1 or a multiple of 16; arguments in a kernel's do_not_specialize may differ.

    Example:
        >>> class Kernel:
        ...     def __getitem__(self, grid):
        ...         return lambda value, SIZE, num_warps: print(grid, value, SIZE)
        >>> CachedLaunch(Kernel(), (4, 1, 1), num_warps=4, SIZE=16)("x")
        (4, 1, 1) x 16
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], **settings: Any) -> None:
        self.kernel, self.grid, self.settings = kernel, grid, settings
        self.again: Callable[..., object] | None = None
        self.constants: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        """Launch the kernel with the arguments that aren't constants of its compilation."""
        if _compilation is not None:
            _compilation.submit(self.kernel, self.grid, *arguments, **self.settings)
            return
        if self.again is not None:
            self.again(*arguments, *self.constants)
            return
        compiled = self.kernel[self.grid](*arguments, **self.settings)
        if hasattr(compiled, "packed_metadata"):  # the interpreter returns None
            names = self.kernel.arg_names[len(arguments) :]
            self.constants = tuple(self.settings[name] for name in names)
            self.again = compiled[self.grid]


@contextlib.contextmanager
def compile_in_parallel() -> Iterator[None]:
    """Compile kernels in threads instead of launching them; on exit all of them are compiled.

    The kernels' outputs are left uninitialised. A kernel that fails to compile raises at its next launch, not here.
    """
    global _compilation
    compilation = _compilation = _Compilation()
    try:
        yield
    finally:
        _compilation = None
        compilation.wait()


class _Compilation:
    """Pending compilations, with one thread for each kernel so that no specialisation is compiled twice."""

    def __init__(self) -> None:
        self.threads: dict[int, ThreadPoolExecutor] = {}
        self.submitted: set[Hashable] = set()
        self.futures: list[Future[None]] = []

    def submit(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Compile a kernel for these arguments, unless the same specialisation was submitted before."""
        key = (id(kernel), frozenset(options.items()), tuple(map(_specialisation, arguments)))
        if key in self.submitted:
            return
        self.submitted.add(key)
        thread = self.threads.get(id(kernel))
        if thread is None:
            thread = self.threads[id(kernel)] = ThreadPoolExecutor(max_workers=1)
        self.futures.append(thread.submit(_compile, kernel, grid, arguments, options))

    def wait(self) -> None:
        """Wait for all compilations."""
        for future in self.futures:
            future.exception()
        for thread in self.threads.values():
            thread.shutdown()


def _compile(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    tensor = next((argument for argument in arguments if isinstance(argument, Tensor)), None)
    if tensor is not None and tensor.is_cuda:
        torch.cuda.set_device(tensor.device)
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    if hasattr(compiled, "_init_handles"):
        compiled._init_handles()  # loads the binary and compiles the launcher


def _specialisation(argument: Any) -> Hashable:
    """What Triton specialises a kernel on: types, devices, and whether a number is 1 or a multiple of 16."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.device, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length() > 31
    if hasattr(argument, "block_shape"):  # a tensor descriptor
        return argument.base.dtype, argument.base.device, tuple(argument.block_shape)
    return str(type(argument))
