"""The page's commands for a router on another machine, as they stand, up to the engine itself."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from zmq.auth import load_certificate

from engine_patches.plugin.settings import Settings, read_settings
from router.config.setting_sources import load_settings
from tests.support.docs import text_of

PAGE = "docs/plugin.md"

# In the place of vLLM: keeps what it is told.
VLLM = f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open('vllm.json', 'w'))\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is left in a folder where the commands were typed."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text_of(PAGE), re.MULTILINE | re.DOTALL)
    (commands,) = (block for block in blocks if "allowed_keys" in block)
    serving = commands.replace("evenstep serve", "evenstep serve --print-config")
    (tmp_path / "vllm").write_text(VLLM)
    (tmp_path / "vllm").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        ["bash", "-euc", serving],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (tmp_path / "serve.toml").write_text(done.stdout)
    return tmp_path


def plug_in(arguments: list[str]) -> Settings:
    return read_settings(json.loads(arguments[arguments.index("--additional-config") + 1]))


def public_key(file: str | None) -> Any:
    assert file is not None
    public, secret = load_certificate(file)
    assert secret is not None
    return public.decode()


def test_engine_and_router_know_each_others_keys(folder: Path) -> None:
    engine = plug_in(json.loads((folder / "vllm.json").read_text()))
    router = load_settings({}, folder / "serve.toml")
    (worker,) = router.workers

    assert engine.allowed_keys == (public_key(router.secret_key_file),)
    assert worker.server_key == public_key(engine.secret_key_file)
    assert engine.snapshots == "tcp://0.0.0.0:5600"
    assert worker.snapshots == "tcp://10.0.0.7:5600"
