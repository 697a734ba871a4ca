from pathlib import Path

import pytest

from router.http.plane import DataPlane
from tests.support.planes import LONG, QUICK, VARIABLE, planes_of

TESTS = Path(__file__).resolve().parents[2]


def test_the_files_that_are_named_exist() -> None:
    assert {path.stem for path in TESTS.rglob("test_*.py")} >= QUICK | LONG
    assert QUICK.isdisjoint(LONG)


def test_the_quick_ones_run_on_both_unless_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert planes_of("test_relay") == list(DataPlane)
    assert planes_of("test_chaos") == []
    monkeypatch.setenv(VARIABLE, "asgi")
    assert planes_of("test_relay") == [DataPlane.ASGI]
