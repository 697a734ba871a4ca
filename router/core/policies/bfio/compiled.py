"""Compilation of kernels by numba, if installed; plain Python otherwise, only slower.

The order of arithmetic is kept, so both give the same results bit by bit. Callers provide all
memory, but for kernels of arrays. Kernels import numba, which takes half a second: import them
where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from types import FunctionType
from typing import Any, TypeVar, cast

Kernel = TypeVar("Kernel", bound=Callable[..., object])

njit: Any = None
with suppress(ImportError):  # the extra ``fast`` is not installed
    njit = import_module("numba").njit

# Kernels never divide by zero, and allocate no memory that needs reference counts.
_LEAN = {"error_model": "numpy", "_nrt": False}
_INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(kernel: Kernel) -> Kernel:
    """Compile a kernel at its first call, with a cache on disk."""
    return _compile(kernel, **_LEAN)


def compiled_arrays(kernel: Kernel) -> Kernel:
    """The same for a kernel that makes arrays."""
    return _compile(kernel, error_model="numpy")


def inner(kernel: Kernel) -> Kernel:
    """Compile a kernel for calls from kernels only; a call from Python would crash."""
    return _compile(kernel, **_LEAN, **_INNER)


def inlined(kernel: Kernel) -> Kernel:
    """Compile a short kernel into its callers, since a call costs 50 ns."""
    return _compile(kernel, forceinline=True, **_LEAN, **_INNER)


def _compile(kernel: Kernel, **options: Any) -> Kernel:
    if njit is None:
        return kernel
    dispatcher = njit(**options)(kernel)
    _keep(dispatcher, import_module("numba.core.caching").FunctionCache)
    return cast(Kernel, dispatcher)


def _keep(dispatcher: Any, cache: Any) -> None:
    """Cache until the kernel or one that it calls changes; numba checks the kernel's file only."""

    class Cache(cache):  # type: ignore[misc]
        def _index_key(self, *of: Any) -> tuple[Any, ...]:
            return (*super()._index_key(*of), fingerprint(dispatcher.py_func))

    with suppress(RuntimeError):  # no directory for the cache
        dispatcher._cache = Cache(dispatcher.py_func)  # noqa: SLF001


def on_disk(kernel: Callable[..., object]) -> bool:
    """True if the code of a kernel's first call is on disk, or needs no compilation."""
    if njit is None:
        return True
    dispatcher: Any = kernel
    cache: Any = dispatcher._cache  # noqa: SLF001
    if not isinstance(cache, import_module("numba.core.caching").FunctionCache):
        return False
    # Of a key (types, machine, kernel) only the types are unknown before the call.
    _, *here = cache._index_key(None, dispatcher.targetctx.codegen())  # noqa: SLF001
    return any(key[1:] == tuple(here) for key in cache._cache_file._load_index())  # noqa: SLF001


def fingerprint(kernel: FunctionType) -> str:
    """A digest of a kernel, its callees and their constants."""
    code = kernel.__code__
    parts = [code.co_code.hex(), repr(code.co_consts)]
    for name in code.co_names:
        value = kernel.__globals__.get(name)
        called = getattr(value, "py_func", value)
        parts.append(fingerprint(called) if isinstance(called, FunctionType) else repr(called))
    return sha256("\n".join(parts).encode()).hexdigest()
