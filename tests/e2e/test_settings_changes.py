"""Settings of a running router, changed by hand and where they are read."""

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server import Server, free_port, running, wait_until

NOBODY = 'workers = ["http://127.0.0.1:9,id=a"]\n'


@dataclass(frozen=True, slots=True)
class Changing:
    """A router, its configuration file and its admin port; its worker is down."""

    router: Server
    config: Path
    http: httpx.Client

    def settings(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/settings").json()
        return answer

    def workers(self) -> list[str]:
        return [worker["id"] for worker in self.http.get("/workers").json()["workers"]]

    def hang_up(self, text: str, said: str) -> None:
        """Have another configuration read."""
        before = self.router.log.read_text().count(said)
        self.config.write_text(text)
        self.router.process.send_signal(signal.SIGHUP)
        wait_until(lambda: self.router.log.read_text().count(said) > before, 60, said)

    def wait_shown(self, policy: str) -> None:
        """Look at the status page's states until one has this policy in force."""
        with self.http.stream("GET", "/events") as stream:
            states = (line for line in stream.iter_lines() if line.startswith("data: "))
            for state in islice(states, 30):
                (group,) = json.loads(state.removeprefix("data: "))["groups"]
                if group["rule"]["policy"] == policy:
                    return
        raise AssertionError(f"{policy} is not shown")


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changing]:
    folder, port, admin = tmp_path_factory.mktemp("router"), free_port(), free_port()
    config = folder / "evenstep.toml"
    config.write_text(f'{NOBODY}policy = "jsq"\n')
    command = [sys.executable, "-m", "router.cli", "serve", "--config", str(config)]
    command += ["--port", str(port), "--admin-port", str(admin)]
    with (
        running(command, port, folder / "router.log", ready="/version") as router,
        httpx.Client(base_url=f"http://127.0.0.1:{admin}", timeout=60, trust_env=False) as http,
    ):
        yield Changing(router, config, http)


def test_some_are_changed_by_hand_all_or_none(changing: Changing) -> None:
    before = changing.settings()
    assert (before["policy"], before["pool_size"], "port" in before) == ("jsq", 1024, False)

    changed = changing.http.patch(
        "/settings", json={"policy": "round_robin", "pool_size": 7}
    ).json()

    assert changed == changing.settings() == before | {"policy": "round_robin", "pool_size": 7}
    changing.wait_shown("round_robin")
    for wrong, message in [
        ({"pool_size": 0, "policy": "jsq"}, "pool_size = 0 should be greater than or equal to 1"),
        ({"policy": "jqs"}, "unknown policy 'jqs'; did you mean jsq? (from the change)"),
        ({"policy": "fcfs", "dispatch": "instant"}, "policy fcfs can dispatch by pool only"),
        ({"port": 1}, "port takes another start to change; these do not: "),
        ({"workers": []}, "workers cannot be changed here, but where it is read"),
        ({"queue_timeout": 1}, "unknown setting 'queue_timeout'; did you mean queue_timeout_s?"),
        ([], "not a JSON object of settings"),
    ]:
        refused = changing.http.patch("/settings", json=wrong)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]
        assert refused.json()["error"]["type"] == "BadRequestError"
    refusal = "admin (127.0.0.1): change settings {'workers': []}: refused: workers cannot be"
    assert refusal in changing.router.log.read_text()
    assert changing.settings() == changed


def test_what_is_read_again_takes_back_nothing_that_was_changed_by_hand(changing: Changing) -> None:
    changing.http.patch("/settings", json={"policy": "random"})
    changing.http.post("/workers", content="http://127.0.0.1:8,id=by-hand")
    text = f'{NOBODY}policy = "jsq"\nqueue_timeout_s = 7\nkv_expiry_s = 2\n'

    changing.hang_up(text, "these take effect at the next start: kv_expiry_s")

    told = changing.settings()
    assert (told["policy"], told["queue_timeout_s"]) == ("random", 7)
    assert changing.workers() == ["a", "by-hand"]
    changing.hang_up(
        text.replace("jsq", "fcfs").replace("id=a", "id=b"), "changed: policy, workers"
    )
    assert changing.settings()["policy"] == "fcfs"
    changing.wait_shown("fcfs")
    assert changing.workers() == ["by-hand", "b"]
    changing.hang_up('policy = "jsq"\nworkers = ["nowhere"]\n', "the settings stay as they are")
    assert changing.settings()["policy"] == "fcfs"
    assert changing.workers() == ["by-hand", "b"]


@pytest.mark.parametrize("method", ["POST", "PATCH", "DELETE"])
def test_a_page_of_another_origin_changes_nothing(changing: Changing, method: str) -> None:
    path = {"PATCH": "/settings", "POST": "/workers", "DELETE": "/workers/by-hand"}[method]
    before = changing.workers(), changing.settings()
    foreign = {"origin": "http://elsewhere.example"}
    answer = changing.http.request(method, path, headers=foreign, content="{}")
    assert (answer.status_code, changing.workers(), changing.settings()) == (403, *before)
    assert answer.json()["error"]["type"] == "PermissionDeniedError"
