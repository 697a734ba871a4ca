from pathlib import Path

from router.http.port import DataPlane
from tests.support.planes import BOTH, SOAKED, planes_of

TESTS = Path(__file__).resolve().parents[2]


def test_the_files_that_are_named_exist() -> None:
    assert {path.stem for path in TESTS.rglob("test_*.py")} >= BOTH | SOAKED
    assert BOTH.isdisjoint(SOAKED)


def test_every_file_that_is_named_runs_on_both_planes() -> None:
    assert planes_of("test_relay", slow=False) == list(DataPlane)
    assert planes_of("test_engine_client", slow=True) == list(DataPlane)
    default, soaked = planes_of("test_chaos", slow=False)
    assert default is DataPlane.SPLICE
    assert soaked.values == (DataPlane.ASGI,)
    assert [mark.name for mark in soaked.marks] == ["slow"]


def test_others_run_on_the_plane_of_the_environment() -> None:
    assert planes_of("test_chaos", slow=True) == planes_of("test_fleet", slow=False) == []
