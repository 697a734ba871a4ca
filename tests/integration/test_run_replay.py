"""A replay as tests and measurements run it: its own report, or none."""

from pathlib import Path

import pytest

from tests.support.replays import run_replay
from tests.support.server import free_port


def test_a_report_of_an_earlier_replay_is_not_taken_for_this_one_s(tmp_path: Path) -> None:
    file = tmp_path / "replay.json"
    file.write_text('{"completed": 99}')
    with pytest.raises(RuntimeError, match=r"ended with 2, no report\n(?s:.*)start a server there"):
        run_replay(f"http://127.0.0.1:{free_port()}", file)
    assert not file.exists()
