"""Kernels are compiled, kept on disk where that can be, and left alone without numba."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from router.core.policies.bfio import compiled
from router.core.policies.bfio.compiled import fingerprint, on_disk

FACTOR = 2


def scaled(number: int) -> int:
    return FACTOR * number


def doubled(number: int) -> int:
    return scaled(number)


def digest(kernel: Any) -> str:
    return fingerprint(kernel)


class Dispatcher:
    """What numba makes of a kernel, as far as it is looked at."""

    def __init__(self, kernel: Any) -> None:
        self.py_func = kernel
        self._cache: Any = None

    def __call__(self, number: int) -> int:
        return int(self.py_func(number))


class DiskCache:
    """Numba's cache, which may find no place."""

    writable = True

    def __init__(self, kernel: Any) -> None:
        if not self.writable:
            raise RuntimeError("cannot cache function: no locator available")

    def _index_key(self, *of: Any) -> tuple[Any, ...]:
        return of


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> type[DiskCache]:
    class Disk(DiskCache):
        pass

    caching = SimpleNamespace(FunctionCache=Disk)
    monkeypatch.setattr(compiled, "njit", lambda **_: Dispatcher)
    monkeypatch.setattr(compiled, "import_module", lambda _: caching)
    return Disk


@pytest.mark.parametrize("way", ["compiled", "compiled_arrays", "inner", "inlined"])
def test_compiled_code_is_kept_by_what_the_kernel_does(way: str, disk: type[DiskCache]) -> None:
    kernel = getattr(compiled, way)(doubled)
    assert kernel(4) == 8
    assert kernel._cache._index_key("signature") == ("signature", digest(doubled))


def test_without_a_place_nothing_is_kept(disk: type[DiskCache]) -> None:
    disk.writable = False
    kernel: Any = compiled.compiled(doubled)
    assert (kernel(4), kernel._cache) == (8, None)


def test_code_is_on_disk_once_the_kernel_has_been_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("numba").config, "CACHE_DIR", str(tmp_path))
    assert not on_disk(kernel := compiled.compiled(scaled))
    assert kernel(4) == 8
    assert on_disk(kernel)
    assert on_disk(compiled.compiled(scaled)), "as in the next process"
    monkeypatch.setitem(scaled.__globals__, "FACTOR", 3)
    assert not on_disk(compiled.compiled(scaled)), "the kernel does something else"


def test_code_that_has_no_place_on_disk_is_not_there() -> None:
    assert not on_disk(import_module("numba").njit(scaled))


def test_without_numba_nothing_is_missing_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "njit", None)
    assert on_disk(doubled)


def test_a_fingerprint_changes_with_a_kernel_that_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = digest(doubled)
    monkeypatch.setitem(doubled.__globals__, "scaled", Dispatcher(scaled))
    assert digest(doubled) == before
    monkeypatch.setitem(doubled.__globals__, "FACTOR", 3)
    assert digest(doubled) != before


@pytest.mark.parametrize("way", ["compiled", "compiled_arrays", "inner", "inlined"])
def test_without_numba_a_kernel_stays_as_it_is(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "njit", None)
    assert getattr(compiled, way)(doubled) is doubled
