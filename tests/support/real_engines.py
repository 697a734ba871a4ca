"""Whole vLLM engines inside one process; run by the engine's interpreter, in the engine's venv.

PYTHONPATH=. VENV/bin/python -m tests.support.real_engines MODEL TASK NUMBER

Where Triton is in the path, engines have vLLM's second model runner.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq

from deploy.engine.serve import write_metadata
from router.core.wire import decode

RUNNING = 32
RUNS = 3
# Random weights: only how long a step takes matters.
LAYERS = 16
BLOCK_TOKENS = 32
EOS = 1


class Engine:
    """A model that generates, with every slot busy.

    Args:
        model: folder of the checkpoint.
        flags: further arguments of vLLM's ``EngineArgs``.
    """

    def __init__(self, model: str, **flags: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        sizes = {"num_gpu_blocks_override": 4096, "max_num_seqs": RUNNING, "max_model_len": 2048}
        arguments = EngineArgs(
            model=model,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=False,
            **{**sizes, **flags},
        )
        self.engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        self._rng = random.Random(1)
        self._requests = 0

    @property
    def scheduler(self) -> Any:
        """vLLM's, or the plug-in's."""
        return self.engine.engine_core.engine_core.scheduler

    def refill(self) -> None:
        """Requests that keep every slot busy, of one prompt and 200 tokens each on average."""
        from vllm.sampling_params import SamplingParams

        while self.engine.get_num_unfinished_requests() < RUNNING + 2:
            self._requests += 1
            tokens = self._rng.randrange(100, 301)
            prompt = {"prompt_token_ids": [9] * self._rng.randrange(16, 128)}
            parameters = SamplingParams(max_tokens=tokens, ignore_eos=True)
            self.engine.add_request(f"cmpl-es-{self._requests:020x}-0", prompt, parameters)

    def step(self) -> tuple[float, float]:
        """One step; seconds by the clock, and of this thread."""
        self.refill()
        core = self.engine.engine_core
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        outputs = core.get_output()
        took = time.perf_counter() - wall_s, time.thread_time() - cpu_s
        self.engine.output_processor.process_outputs(outputs.outputs)
        return took


def steps(model: str, endpoint: str, number: int) -> dict[str, Any]:
    """Step times of two engines of one load, which take turns and take turns in having the plug-in.

    Two engines differ a little by themselves, so each has the plug-in as often as the other; that
    difference is given as well.

    Returns:
        Microseconds by the clock (``wall``) and of the engine's thread (``cpu``): medians of a step
        ``without`` the plug-in, and of ``more``, what a step of the engine with it takes more than
        the same one of the other; of each way how much each run's ``more`` was.
    """
    flags: dict[str, Any] = {"load_format": "dummy"}
    flags["hf_overrides"] = {"num_hidden_layers": LAYERS}
    config = {"evenstep": {"snapshots": endpoint}}
    scheduler = "engine_patches.scheduler.EvenstepScheduler"
    flags |= {"scheduler_cls": scheduler, "additional_config": config}
    engines = []
    for _ in "12":
        engines.append(Engine(model, **flags))
        unhook(engines[-1])
    messages = read(endpoint)
    take_turns(engines, messages, number // 5)
    took: dict[int | None, list[Turns]] = {0: [], 1: [], None: []}
    for _ in range(RUNS):
        for which, turns in took.items():
            if which is not None:
                hook(engines[which], config)
            turns.append(take_turns(engines, messages, number))
            if which is not None:
                unhook(engines[which])
    return {clock: compared(took, index) for index, clock in enumerate(("wall", "cpu"))}


Turns = list[tuple[tuple[float, float], tuple[float, float]]]
"""Of each turn, what the step of either engine took; as ``Engine.step`` gives it."""


def hook(engine: Engine, config: dict[str, Any]) -> None:
    """Give an engine's scheduler the plug-in."""
    from engine_patches.plugin.compat import EngineView
    from engine_patches.plugin.reporter import Reporter
    from engine_patches.plugin.settings import read_settings
    from engine_patches.scheduler import EvenstepScheduler

    scheduler = engine.scheduler
    scheduler.evenstep = Reporter(EngineView(scheduler), read_settings(config))
    scheduler.__class__ = EvenstepScheduler


def unhook(engine: Engine) -> None:
    """Have an engine's scheduler do as vLLM's own does."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = engine.scheduler
    assert not scheduler.evenstep.failed
    scheduler.evenstep.close()
    # Python changes a class only for one made alike.
    scheduler.__class__ = type("Plain", (type("Nothing", (), {}), Scheduler), {})


def take_turns(engines: list[Engine], messages: zmq.Socket[bytes], number: int) -> Turns:
    """Some steps of each, in changing order."""
    turns = []
    for turn in range(number):
        took = {which: engines[which].step() for which in ((0, 1) if turn % 2 else (1, 0))}
        turns.append((took[0], took[1]))
        while messages.poll(0):
            messages.recv()
    return turns


def compared(took: dict[int | None, list[Turns]], clock: int) -> dict[str, Any]:
    """One clock's part of what ``steps`` returns."""
    more = {
        which: [
            statistics.median(
                (two[clock] - one[clock]) if which == 1 else (one[clock] - two[clock])
                for one, two in turns
            )
            for turns in runs
        ]
        for which, runs in took.items()
    }
    alike = [one[clock] for turns in took[None] for turn in turns for one in turn]
    return {
        "without_us": round(statistics.median(alike) * 1e6, 1),
        "more_us": round(statistics.fmean(map(statistics.median, (more[0], more[1]))) * 1e6, 1),
        "runs_us": {
            name: [round(each * 1e6, 1) for each in more[which]]
            for name, which in (("first", 0), ("second", 1), ("neither", None))
        },
    }


# --- ends -----------------------------------------------------------------------------------------


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def ends(model: str, endpoint: str, number: int, **flags: Any) -> dict[str, Any]:
    """What the stream tells of coming ends, beside vLLM's log-probabilities of all tokens.

    Returns:
        By the way in which requests end: what was told, as generated tokens, probability, and the
        tokens before the last preemption; and what should have been: by step, the tokens before
        it, and the probability that its first token was the last one.
    """
    from vllm.sampling_params import SamplingParams

    signalling, messages = with_end_signal(
        model, endpoint, max_logprobs=-1, max_num_batched_tokens=64, **flags
    )
    engine = signalling.engine
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "cold": {"temperature": 0.05},
        "several": {"temperature": 1, "stop_token_ids": [40, 41, 42]},
        "ignored": {"temperature": 1, "ignore_eos": True},
        "at first not": {"temperature": 1, "min_tokens": 10},
    }
    for turn, (name, settings) in enumerate(ways.items()):
        # Drafts need what repeats itself. Else what comes next differs from part to part.
        differ = 0 if "speculative_config" in flags else 7
        prompt = {"prompt_token_ids": [9 + differ * n % 190 for n in range(20 + 40 * turn)]}
        parameters = SamplingParams(max_tokens=number, logprobs=-1, **settings)
        engine.add_request(name, prompt, parameters)
    told: dict[str, list[tuple[int, float, int]]] = {name: [] for name in ways}
    should: dict[str, list[tuple[int, float]]] = {name: [] for name in ways}
    seen, since = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    while engine.has_unfinished_requests():
        for output in engine.step():
            given, before = output.outputs[0].logprobs, seen[output.request_id]
            way, seen[output.request_id] = ways[output.request_id], len(given)
            if before == len(given):
                continue
            tokens = [] if "ignore_eos" in way else [*way.get("stop_token_ids", []), EOS]
            it_is = chance(given[before], way["temperature"] or 1, tokens)
            never = before < way.get("min_tokens", 0)
            should[output.request_id].append((before, 0.0 if never else it_is))
        while messages.poll(50):
            message = decode(messages.recv())
            for name in map(name_of, message.preempted):
                since[name] = seen[name]
            for row in message.running:
                name = name_of(row.id)
                if row.end_probability is not None and row.generated_tokens > since[name]:
                    told[name].append((row.generated_tokens, row.end_probability, since[name]))
    return {name: {"told": told[name], "should": should[name]} for name in ways}


def name_of(id_: str) -> str:
    """As the request was named."""
    return id_.rpartition("-")[0] or id_


def hidden(model: str, endpoint: str, number: int) -> dict[str, Any]:
    """So many requests that end at lengths of their own, without drafted tokens and with them.

    Returns:
        By engine: what each request should have generated and what it has, and how many steps
        brought one several tokens.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.version import __version__

    report: dict[str, Any] = {}
    kept = []  # the end of one would take what the other shares with it
    kinds: dict[str, dict[str, Any]] = {"plain": {}}
    # The first runner refuses both together, and 0.31's second one has no such drafts.
    if find_spec("triton") and not __version__.startswith("0.31."):
        kinds["drafts"] = {"speculative_config": DRAFTS}
    for name, more in kinds.items():
        processor = "engine_patches.hidden_length:HiddenLength"
        kept.append(Engine(model, logits_processors=[processor], **more))
        engine = kept[-1].engine
        lengths = {str(one): 1 + 7 * one % 40 for one in range(number)}
        for one, length in lengths.items():
            settings = SamplingParams(
                max_tokens=60,
                # Drafts are taken from what repeats itself.
                temperature=[0, 0.05, 1][int(one) % 3],
                stop_token_ids=[40, 41] if int(one) % 2 else None,
                extra_args={"evenstep_output_tokens": length},
            )
            engine.add_request(one, {"prompt_token_ids": [9, 10 + int(one)] * 20}, settings)
        seen, several = dict.fromkeys(lengths, 0), 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = len(output.outputs[0].token_ids)
                several += tokens > seen[output.request_id] + 1
                seen[output.request_id] = tokens
        report[name] = {"should": lengths, "seen": seen, "several": several}
    return report


def with_end_signal(model: str, endpoint: str, **flags: Any) -> tuple[Engine, zmq.Socket[bytes]]:
    """An engine that tells of coming ends, and a router's end of its stream."""
    engine = Engine(
        model,
        scheduler_cls="engine_patches.scheduler.EvenstepScheduler",
        logits_processors=["engine_patches.end_signal:EndSignal"],
        additional_config={"evenstep": {"snapshots": endpoint, "end_signal": True}},
        **flags,
    )
    return engine, read(endpoint)


def chance(logprobs: dict[int, Any], temperature: float, tokens: list[int]) -> float:
    """Of some tokens, from the log-probabilities of all at temperature 1."""
    weights = {token: math.exp(one.logprob / temperature) for token, one in logprobs.items()}
    return sum(weights[token] for token in tokens) / sum(weights.values())


def read(endpoint: str) -> zmq.Socket[bytes]:
    """A router's end of the stream."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    return socket


def use_second_runner() -> None:
    """On the CPU: Triton's own interpreter runs the kernels, and stands for a device's driver."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends.clear()
    backends["cpu"] = SimpleNamespace(driver=driver)
    from triton.runtime import interpreter

    # Its masks must be bool, which those of vLLM's drafts are not.
    native = interpreter._interpreter
    interpreter._interpreter = SimpleNamespace(
        **{name: getattr(native, name) for name in dir(native) if name[0] != "_"}
        | {
            "load": lambda at, mask, *more: native.load(at, mask.astype(bool), *more),
            "store": lambda at, value, mask: native.store(at, value, mask.astype(bool)),
        }
    )


def main() -> None:
    """Print one line of JSON."""
    folder = Path(sys.prefix) / "vllm-name"
    write_metadata(folder)
    sys.path.insert(0, str(folder))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if find_spec("triton"):
        use_second_runner()
    gc.freeze()
    drafted = partial(ends, speculative_config=DRAFTS)
    # Room for the longest request, and little more.
    preempted = partial(ends, num_gpu_blocks_override=12, max_model_len=320)
    tasks: dict[str, Callable[..., dict[str, Any]]]
    tasks = {"steps": steps, "ends": ends, "drafted": drafted, "hidden": hidden}
    tasks["preempted"] = preempted
    task = tasks[sys.argv[2]]
    with tempfile.TemporaryDirectory(prefix="evenstep-") as streams:
        report = task(sys.argv[1], f"ipc://{streams}/s", int(sys.argv[3]))
    sys.stdout.write("\n" + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
