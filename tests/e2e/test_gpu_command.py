"""``make gpu`` where something is missing or wrong: it says what, and measures nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("python", "flags", "status", "said"),
    [
        (["-S"], [], 1, "has no httpx, msgspec, numpy, zmq: name an interpreter that does"),
        (["-S"], ["pair"], 1, "httpx, msgspec, numpy, zmq, fastapi, httptools"),
        ([], ["--dry-run", "--python", sys.executable], 2, "has no vLLM: name an interpreter"),
        ([], ["--limit-s", "0"], 2, "'0' should be seconds: above 0, a day at most"),
        ([], ["--limit-s=-5"], 2, "'-5' should be seconds"),
        ([], ["pair", "--limit-s", "nan"], 2, "'nan' should be seconds"),
        ([], ["--limit-s", "soon"], 2, "'soon' should be seconds"),
        (
            [],
            ["--parts", "grid"],
            2,
            "'grid' is none of decode, prompts, idle, plug-in, budget, prefixes",
        ),
        (["-S"], ["group"], 1, "httpx, msgspec, numpy, zmq, fastapi, httptools"),
        ([], ["group", "--ranks", "1"], 2, "'1' should be 2 or more"),
        ([], ["group", "--ranks", "99"], 2, "99 ranks need a GPU each, and engines see "),
        ([], ["group", "--dry-run", "--model", "m"], 2, "leave out --model"),
        ([], ["group", "--shape", "llama-3-8b"], 2, "invalid choice: 'llama-3-8b'"),
    ],
)
def test_what_is_missing_is_said(
    python: list[str], flags: list[str], status: int, said: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, *python, "-m", "tests.gpu", *flags, "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
    assert not out.exists()
