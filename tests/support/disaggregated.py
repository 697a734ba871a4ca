"""Two real engines that share prompts' KV through a folder: one computes it, the other decodes.

vLLM's ExampleConnector writes a prompt's whole blocks into a folder named after its tokens, and
finds them there. It is made to be read, not for production: prompts must fit into one step, must
not be a block and one token long, nor one token (0.32's engine dies of a prompt whose folder is
there with fewer tokens than it looks for). So prompts here are of random letters, and ``found``
says how many of their tokens are.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import zmq

from router.core.types import RunningRequest
from router.core.wire import decode, request_token
from tests.support.engine import MODEL, Installation, metric, starting_engine
from tests.support.engine_python import ROOT
from tests.support.server import Server, free_port, wait_until

BLOCK_TOKENS = 32
SLOTS = 4
WAIT_S = 60
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_letters = random.Random(1)


def letters(number: int) -> str:
    """A prompt of so many tokens that no other one begins like."""
    return "".join(_letters.choices(string.ascii_lowercase, k=number))


def found(prompt_tokens: int) -> int:
    """How many tokens of a prompt that another engine has computed are found.

    The connector leaves out the last token to write, and the last two to look.
    """
    blocks = (prompt_tokens - 1) // BLOCK_TOKENS
    return blocks * BLOCK_TOKENS if blocks == (prompt_tokens - 2) // BLOCK_TOKENS else 0


@dataclass
class Pair:
    """The two engines; ``decode`` has the plug-in.

    Attributes:
        endpoint: of the decode engine's state stream.
        ports: of ``prefill`` and ``decode``.
    """

    where: Installation
    folder: Path
    stack: contextlib.ExitStack
    endpoint: str = field(default_factory=lambda: f"tcp://127.0.0.1:{free_port(2)}")
    ports: tuple[int, int] = field(default_factory=lambda: (free_port(), free_port()))

    def __post_init__(self) -> None:
        self._kv = self.folder / "kv"
        self._kv.mkdir()
        self.prefill = self.start_prefill()
        plug_in = json.dumps({"evenstep": {"snapshots": self.endpoint}})
        self.decode = self._start(
            self.ports[1],
            *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
            *("--additional-config", plug_in),
        )

    def start_prefill(self) -> Server:
        """Start it, again if it was killed, without waiting for it."""
        self.prefill = self._start(self.ports[0])
        return self.prefill

    def _start(self, port: int, *flags: str) -> Server:
        connector = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self._kv)},
        }
        transfer = ("--kv-transfer-config", json.dumps(connector))
        return self.stack.enter_context(
            starting_engine(
                self.where,
                self.folder,
                *transfer,
                *("--max-num-seqs", str(SLOTS)),
                *flags,
                environment={"PYTHONPATH": str(ROOT)},
                port=port,
            )
        )

    def alone(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the decode engine answers when it has to compute the prompt itself.

        Of several answers to one prompt, the others find what the first has computed.
        """
        for prompt in self._kv.iterdir():
            shutil.rmtree(prompt)
        before = hits(self.decode)
        answer = ask(self.decode, path, body)
        others = body.get("n", 1) - 1
        assert hits(self.decode) - before <= others * found(answer["usage"]["prompt_tokens"])
        return answer


def hits(engine: Server) -> int:
    """Prompt tokens that an engine has found elsewhere so far."""
    return int(metric(engine, "vllm:external_prefix_cache_hits_total"))


def prompt_tokens(engine: Server) -> int:
    """Prompt tokens that an engine has been given so far."""
    return int(metric(engine, "vllm:prompt_tokens_total"))


def held(engine: Server) -> float:
    """What an engine has left of any request: such that run or wait, and their share of its KV."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return sum(metric(engine, f"vllm:{name}") for name in names)


def wait_idle(*engines: Server) -> None:
    wait_until(lambda: not any(map(held, engines)), WAIT_S, "the engines drop all requests")


def freeze(engine: Server) -> None:
    """Have an engine do nothing from now on, with its connections open."""
    os.killpg(engine.process.pid, signal.SIGSTOP)


def kill(engine: Server) -> None:
    """End all processes of an engine at once."""
    os.killpg(engine.process.pid, signal.SIGKILL)
    engine.process.wait(timeout=WAIT_S)


def ask(server: Server, path: str, body: Mapping[str, Any], request_id: str = "") -> dict[str, Any]:
    """What a client is answered, whether in a stream or not.

    Returns:
        ``usage``, ``choices`` by index: their text, tokens' log-probabilities and finish reasons.
    """
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 16, **body}
    headers = {"X-Request-Id": request_id} if request_id else {}
    url = server.url + path
    with httpx.stream("POST", url, json=asked, headers=headers, timeout=2 * WAIT_S) as told:
        content = told.read()
        assert told.status_code == 200, content
    if not body.get("stream"):
        return _folded([json.loads(content)])
    *events, done = [line for line in content.split(b"\n") if line.startswith(b"data: ")]
    assert done == b"data: [DONE]"
    return _folded([json.loads(event[6:]) for event in events])


def _folded(parts: list[dict[str, Any]]) -> dict[str, Any]:
    usage: dict[str, Any] | None = None
    choices: dict[int, tuple[str, list[float], str | None]] = {}
    for part in parts:
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            text, logprobs, finish = choices.get(choice["index"], ("", [], None))
            text += _text(choice)
            logprobs = logprobs + _logprobs(choice.get("logprobs"))
            choices[choice["index"]] = text, logprobs, choice["finish_reason"] or finish
    return {"usage": usage, "choices": choices}


def _text(choice: Mapping[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")


def _logprobs(given: Mapping[str, Any] | None) -> list[float]:
    if given is None:
        return []
    if "content" in given:
        return [float(one["logprob"]) for one in given["content"] or ()]
    return list(given["token_logprobs"])


@contextlib.contextmanager
def rows(endpoint: str) -> Iterator[Any]:
    """While it lasts, a function that waits for the first that an engine tells of a request."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
    socket.connect(endpoint)
    socket.recv()  # from here on nothing is missed

    def first(token: str) -> RunningRequest:
        while True:
            for row in decode(socket.recv()).running:
                if request_token(row.id) == token:
                    return row

    yield first
    context.destroy(linger=0)
