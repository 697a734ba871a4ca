"""``evenstep emulate``: run an emulated fleet until a signal stops it."""

import asyncio
import gc
import signal
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from engine_patches.admission import ADMISSIONS
from loadgen.emulator.emulated_fleet import EmulatedFleet
from loadgen.emulator.emulator_settings import EmulatorSettings, snapshot_endpoints
from loadgen.emulator.listener import EVERY_ADDRESS
from loadgen.engine.engine_features import EngineFeatures, parse_drafts, parse_window
from loadgen.engine.prefill_settings import (
    DEFAULT_PREFILL,
    DEFAULT_TRANSFER,
    KvLoadFailure,
    parse_prefill,
)
from loadgen.model.measured_step_time import load_step_time
from loadgen.run.admission_options import parse_admission, told_warnings
from loadgen.run.options import StepTimeFlag, command_of, same_named
from router.commands.json_output import STDOUT, json_option
from router.commands.options import flag
from router.core.errors import InputError
from router.core.step_time import numbers
from router.core.wire import is_local


@dataclass(frozen=True, slots=True)
class EmulateOptions:
    """Command line of ``evenstep emulate``."""

    workers: Annotated[int, flag("Workers, one HTTP port each.", "G")] = 4
    port: Annotated[int, flag("Port of the first worker.", "FIRST")] = 8100
    slots: Annotated[int, flag("Requests that a worker runs at once.", "B")] = 72
    kv_tokens: Annotated[int, flag("KV memory of a worker.", "N")] = 400_000
    max_model_len: Annotated[int | None, flag("Longest prompt plus output [KV memory].", "N")] = (
        None
    )
    step_time: StepTimeFlag = "4.95e-3,9.5e-8"
    time_scale: Annotated[
        float, flag("Wall seconds per engine second; above 1 is slower.", "X")
    ] = 1.0
    barrier: Annotated[bool, flag("Workers step together, or each alone.")] = True
    lockstep: Annotated[
        bool, flag("As real ranks, workers stall while one is dead, and tell so.")
    ] = False
    speed: Annotated[str, flag("Relative speed: of each worker, or of all.", "1,1,.5")] = "1"
    model: Annotated[str, flag("Name of the model served.", "NAME")] = "emulated"
    group: Annotated[str, flag("Group of the workers.", "NAME")] = "default"
    seed: Annotated[int, flag("For texts, and lengths nobody gave.", "N")] = 0
    stream_interval: Annotated[int, flag("Tokens per streamed event, as in vLLM.", "N")] = 1
    record: Annotated[Path | None, flag("Write a row per step, .csv or .csv.gz.", "FILE")] = None
    answers: Annotated[
        Path | None, flag("Write a line of JSON per answer: what was sent of it.", "FILE")
    ] = None
    control_port: Annotated[int | None, flag("Fault port [after the last worker's].", "N")] = None
    snapshot_port: Annotated[
        int | None, flag("First of two per worker [after the fault port].", "N")
    ] = None
    snapshots: Annotated[bool, flag("Publish the state of every step.")] = True
    prefill_workers: Annotated[
        int, flag("Further workers that only prefill, each stepping alone.", "P")
    ] = 0
    prefill_step_time: Annotated[
        str | None,
        flag(
            "Seconds: a prefill worker's step, and each prompt token that a step computes, also at "
            f"workers whose --step-time has no t_p [{DEFAULT_PREFILL} with prefill "
            "workers; without and with no t_p, prompts cost nothing].",
            "C,t_p",
        ),
    ] = None
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            "--batch-tokens",
            "--prefill-chunk",
            help="Tokens that a step computes at most, prompts and decoding requests "
            "together [2048].",
            metavar="N",
        ),
    ] = None
    prefill_kv_tokens: Annotated[
        int | None, flag("KV memory of a prefill worker [--kv-tokens].", "N")
    ] = None
    kv_transfer_time: Annotated[
        str | None,
        flag(f"Seconds: to fetch a request's KV, and per token of it [{DEFAULT_TRANSFER}].", "L,t"),
    ] = None
    kv_expiry: Annotated[
        float | None,
        flag(
            "Engine seconds (times --time-scale on the clock) that KV stays which "
            "nobody fetches [30].",
            "S",
        ),
    ] = None
    kv_load_failure: Annotated[
        KvLoadFailure | None, flag("What happens to a prompt whose KV is gone, as in vLLM [fail].")
    ] = None
    admission: Annotated[
        str | None,
        flag(
            f"Who enters an engine: one of {', '.join(ADMISSIONS)}, or settings as the plug-in's, "
            '{"policy": "headroom", "headroom": 0.1} [as vLLM by itself].',
            "POLICY|JSON",
        ),
    ] = None
    time_waits: Annotated[
        bool,
        flag("Workers tell how long they waited for the others in each step.", name="--time-waits"),
    ] = False
    prefix_caching: Annotated[bool, flag("Compute no block of a prompt twice, as vLLM.")] = True
    block_tokens: Annotated[int, flag("Tokens of a KV block.", "N")] = 16
    prompt_budget: Annotated[
        int | None, flag("Prompt tokens that a step computes at most [the batch's].", "N")
    ] = None
    long_prefill_token_threshold: Annotated[
        int | None,
        flag("Prompt tokens of one request that a step computes at most [no further bound].", "N"),
    ] = None
    prefill_every: Annotated[
        int, flag("Compute prompts in every Nth step, the same on all workers.", "N")
    ] = 1
    speculate: Annotated[
        str | None,
        flag(
            "Speculative decoding: drafts of a step, and the probability that each is "
            "accepted [off].",
            "K,ACCEPT",
        ),
    ] = None
    window: Annotated[
        str | None,
        flag(
            "Sliding window: tokens, and the share of the layers that keep no more, "
            "such as 1024,5/6 [every layer keeps every token].",
            "TOKENS[,SHARE]",
        ),
    ] = None
    kv_events_port: Annotated[
        int | None, flag("First port of KV events as vLLM's, one per worker [none].", "N")
    ] = None
    host: Annotated[str, flag("Address to listen on; state streams stay on 127.0.0.1.", "H")] = (
        "127.0.0.1"
    )
    json: Annotated[str | None, json_option("Write what was started as JSON, - for stdout.")] = None

    def settings(self) -> EmulatorSettings:
        """Build the fleet's settings from the options."""
        ranks = self.workers + self.prefill_workers
        first = self.snapshot_port or (self.control_port or self.port + ranks) + 1
        entry, drafts = self.admission, self.speculate
        step_time = load_step_time(self.step_time)
        settings = EmulatorSettings(
            **same_named(self, EmulatorSettings)
            | {
                "step_time": step_time,
                "speeds": tuple(numbers("--speed", self.speed)),
                "snapshots": (),
                "prefill": parse_prefill(
                    self.prefill_workers,
                    self.prefill_step_time,
                    prompts_cost=step_time.per_prompt_token_s > 0,
                    chunk=self.batch_tokens,
                    kv_tokens=self.prefill_kv_tokens,
                    transfer_time=self.kv_transfer_time,
                    kv_expiry_s=self.kv_expiry,
                    load_failure=self.kv_load_failure,
                ),
                "admission": None if entry is None else parse_admission("--admission", entry),
                "features": EngineFeatures(
                    **same_named(self, EngineFeatures)
                    | {
                        "acceptance": () if drafts is None else parse_drafts(drafts),
                        "window": None if self.window is None else parse_window(self.window),
                    }
                ),
            }
        )
        if not self.snapshots:
            return settings
        return replace(settings, snapshots=snapshot_endpoints(first, ranks))


@command_of(EmulateOptions)
def emulate(options: EmulateOptions) -> None:
    """Run emulated engines: vLLM's API in front of modelled steps, no model and no GPU.

    With a t_p in --step-time, --prefill-workers or --prefill-step-time prompts take time, and KV
    moves between workers as with vLLM's NIXL connector.
    """
    with told_warnings():
        uvloop.run(_run(options.settings(), options.json))


async def _run(settings: EmulatorSettings, json: str | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with EmulatedFleet(settings) as fleet:
        gc.collect()
        gc.freeze()
        _announce(fleet, json)
        await fleet.wait(stop)


def _announce(fleet: EmulatedFleet, json: str | None) -> None:
    typer.echo(_ready_text(fleet), err=json == STDOUT)
    if json is None:
        return
    settings = fleet.settings
    endpoints = settings.snapshots or (None,) * settings.ranks
    ready = msgspec.json.encode(
        {
            "emulated": True,
            "model": settings.model,
            "group": settings.group,
            "time_scale": settings.time_scale,
            "barrier": settings.barrier,
            "slots": settings.slots,
            "engines": settings.described(),
            "control": fleet.control.url,
            "workers": [
                {
                    "rank": rank,
                    "role": settings.role(rank),
                    "url": listener.url,
                    "snapshots": endpoints[rank],
                    "spec": fleet.worker_spec(rank),
                }
                for rank, listener in enumerate(fleet.listeners)
            ],
        }
    ).decode()
    if json == STDOUT:
        typer.echo(ready)
        return
    # Rename into place: a reader that waits for the file must never see half of it.
    partial = Path(f"{json}.partial")
    try:
        partial.write_text(ready + "\n", encoding="utf-8")
        partial.replace(json)
    except OSError as error:
        raise InputError(f"cannot write {json}: {error.strerror}") from error


def _ready_text(fleet: EmulatedFleet) -> str:
    settings = fleet.settings
    together = "stepping together" if settings.barrier else "each stepping alone"
    workers = settings.ranks - settings.workers
    lines = [
        f"{settings.workers} emulated workers (no model, no GPU), {together}, "
        f"{settings.time_scale:g} wall seconds per engine second",
        *([f"{workers} more that only prefill, each stepping alone"] if workers else []),
        f"Engines: {settings.features}, {settings.prompts_text}",
        *([f"Who enters: {settings.admission.policy}"] if settings.admission else []),
        f"Fault port: {fleet.control.url}",
        "For evenstep serve:",
        *(f"  --worker {fleet.worker_spec(rank)}" for rank in range(settings.ranks)),
    ]
    if not is_local(f"tcp://{settings.host}:{settings.port}"):
        name = socket.gethostname() if settings.host in EVERY_ADDRESS else settings.host
        lines.append("For evenstep serve on another machine, where the state streams do not go:")
        lines += [f"  --worker {fleet.worker_spec(rank, name)}" for rank in range(settings.ranks)]
    return "\n".join(lines)
