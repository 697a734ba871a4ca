"""Two real vLLM ranks that step together: a tiny mixture of experts, data-parallel, on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.engine import ENVIRONMENT, READY_S, Installation, starting_engine
from tests.support.engine_python import ROOT
from tests.support.engine_stat_log_entry import install_plug_in
from tests.support.server import Server, free_port, wait_ready

RANKS = 2
SLOTS = 8
CONTEXT_TOKENS = 16384
FLAGS = (
    *("--data-parallel-size", str(RANKS), "--data-parallel-address", "127.0.0.1"),
    *("--max-num-seqs", str(SLOTS), "--max-model-len", str(CONTEXT_TOKENS)),
    *("--max-num-batched-tokens", "2048"),
    *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
    *("--logits-processors", "engine_patches.hidden_length:HiddenLength"),
)


@dataclass(frozen=True, slots=True)
class Group:
    """A data-parallel group of ``RANKS`` ranks.

    Attributes:
        servers: one for each rank, or one alone where vLLM balances between them itself.
        endpoints: each rank's state stream.
    """

    servers: tuple[Server, ...]
    endpoints: tuple[str, ...]

    @property
    def workers(self) -> list[str]:
        """Its ranks for ``evenstep serve --worker``."""
        urls = [server.url for server in self.servers]
        if len(urls) < RANKS:
            urls = [f"{urls[0]},rank={rank}" for rank in range(RANKS)]
        pairs = zip(urls, self.endpoints, strict=True)
        return [f"{url},snapshots={endpoint}" for url, endpoint in pairs]


def moe_installation(where: Installation, folder: Path) -> Installation:
    """The engine with the tiny mixture of experts, which is made in ``folder``."""
    command = [str(where.python), "-m", "tests.support.moe_lockstep.model", str(folder)]
    path = {"PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **ENVIRONMENT, **path}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    return replace(where, model=folder)


@contextlib.contextmanager
def running_ranks(
    where: Installation,
    folder: Path,
    *flags: str,
    balancer: bool = False,
    at: Group | None = None,
) -> Iterator[Group]:
    """Run a group until the block ends.

    Args:
        where: of ``moe_installation``.
        folder: for logs and the plug-in's entry.
        flags: further ones of ``vllm serve``.
        balancer: one server, and vLLM's own balancer between the ranks.
        at: a group that has ended, whose ports this one takes.
    """
    # Each stream takes two.
    port = free_port(2 * RANKS + 1) if at is None else int(at.endpoints[0].rpartition(":")[2])
    https = [None] * RANKS if at is None else [server.port for server in at.servers]
    rpc_port = port + 2 * RANKS
    streams = {"evenstep": {"snapshots": f"tcp://127.0.0.1:{port}"}}
    common = (*FLAGS, "--data-parallel-rpc-port", str(rpc_port), *flags)
    common = (*common, "--additional-config", json.dumps(streams))
    each = [("--data-parallel-rank", str(rank)) for rank in range(RANKS)]
    # One front end knows of every request that the balancer has given to a rank.
    alone = [("--api-server-count", "1")]
    path = os.pathsep.join([str(ROOT), str(collectives(folder))])
    endpoints = tuple(f"tcp://127.0.0.1:{port + 2 * rank}" for rank in range(RANKS))
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                starting_engine(
                    where, folder, *common, *own, environment={"PYTHONPATH": path}, port=http
                )
            )
            for own, http in zip(alone if balancer else each, https, strict=False)
        ]
        for server in servers:
            wait_ready(server, 2 * READY_S)
        yield Group(tuple(servers), endpoints)


def collectives(folder: Path) -> Path:
    """Have vLLM find what it lacks on CPUs; the folder to add to ``PYTHONPATH``."""
    entry = "tests.support.moe_lockstep.collectives:register"
    return install_plug_in(folder, "vllm.general_plugins", "moe_lockstep", entry)
