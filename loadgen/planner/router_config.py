"""Chains as workers of ``evenstep serve``."""

import json
from collections.abc import Sequence

from loadgen.planner.vllm import Engine


def router_config(engines: Sequence[Engine]) -> str:
    """A TOML file for ``evenstep serve --config``."""
    lines = ['policy = "jffc"   # the fastest chain with a free slot; the others wait in one queue']
    for engine in engines:
        held = ", ".join(machine.name for machine in engine.stages)
        lines += [
            "",
            "[[workers]]",
            f"id = {json.dumps(engine.name)}   # {held}",
            f"url = {json.dumps(engine.url)}",
            f"slots = {engine.chain.slots}",
            f"service_rate = {engine.chain.service_rate:.6g}   # per slot and second, as planned",
        ]
    return "\n".join(lines) + "\n"
