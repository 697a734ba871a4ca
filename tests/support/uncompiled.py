"""The solver as it is where numba is not installed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import cast
from unittest.mock import patch

from router.core.policies import bfio
from router.core.policies.bfio.solver import Instance, Solution

Solve = Callable[[Instance, int], Solution]


@contextmanager
def uncompiled() -> Iterator[Solve]:
    """Imports the solver once more, without numba; nothing of that stays behind."""
    package = bfio.__name__
    with patch.dict(bfio.__dict__), _without("numba", f"{package}."):
        assert import_module(f"{package}.compiled").njit is None
        yield cast(Solve, import_module(f"{package}.solver").solve)


@contextmanager
def _without(missing: str, anew: str) -> Iterator[None]:
    """One module cannot be imported, and those whose names begin so are imported anew."""
    known = {missing: import_module(missing), **_taken_out(anew)}
    sys.modules[missing] = cast(ModuleType, None)
    try:
        yield
    finally:
        _taken_out(anew)
        sys.modules.update(known)


def _taken_out(prefix: str) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.startswith(prefix)]
    return {name: sys.modules.pop(name) for name in names}
