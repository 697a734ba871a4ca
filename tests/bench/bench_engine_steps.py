"""The learned step time on a real engine that computes prompts: how well it knows the steps.

    python tests/bench/bench_engine_steps.py [--chats 90] [--steps FILE] [--replay] [--json FILE]

The trained model of `make engine` in vLLM on the CPU, with the plug-in, answers chats of 20 to
1,200 words, 12 at a time. The fit learns one step after the other, as in the router, and predicts
each before it does. ``--steps`` keeps the steps, ``--replay`` fits kept ones without an engine.
Needs the CPU engine (`make engine`), and a processor that nobody else wants meanwhile.
"""

import argparse
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from docs.kept_figures import read_figures
from loadgen.report.origin import KEY, Engines, origin, with_files
from tests.support.engine import Installation, installation
from tests.support.engine_steps import RECORDED, Recording, Report, Step, judged, recorded
from tests.support.figure_files import write_figures
from tests.support.rank_steps import rank_steps, reading
from tests.support.trained import CONTEXT_TOKENS, SLOTS, answered, chats, running_trained

CODE = (
    "router/core/step_fit.py",
    "router/core/state/feed.py",
    "engine_patches/plugin",
    "tests/support/trained.py",
    "tests/support/engine_steps.py",
    "tests/bench/bench_engine_steps.py",
)
WORDS = (20, 1200)
MOST_TOKENS = 160


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--chats", type=int, default=90)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--steps", type=Path)
    options.add_argument("--replay", action="store_true")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    if given.replay:
        recording = recorded()
    else:
        engine = installation()
        if engine is None:
            print("no engine: run `make engine` first")
            return
        recording = measured(engine, given.chats, given.seed)
        if given.steps:
            recording.write(given.steps)
    report = judged(recording.steps)
    show(report)
    if given.json:
        header = origin(Engines.REAL, CODE, vllm=recording.origin["versions"]["vllm"])
        recorded_as = {KEY: with_files(recording.origin, given.steps or RECORDED)}
        if given.replay and given.json.exists():
            recorded_as = read_figures(given.json)["recorded"]
        about = {"conditions": recording.conditions, "recorded": recorded_as}
        write_figures(given.json, {**about, **asdict(report)}, header)


def measured(engine: Installation, count: int, seed: int) -> Recording:
    """The engine's steps while it answers."""
    header = origin(Engines.REAL, CODE, vllm=engine.vllm)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_trained(engine, Path(folder)) as trained,
        reading([trained.endpoint]) as log,
    ):
        answered(trained.server, chats(count, seed, WORDS), MOST_TOKENS)
        busy = os.getloadavg()[0]
        log.rest(count)
        steps = [Step.of(step) for _, step in sorted(rank_steps(log.snapshots[0]).items())]
    conditions = {
        "model": "SmolLM2-135M-Instruct, bfloat16",
        "cores": os.cpu_count(),
        "load_average": busy,
        "chats": count,
        "words": WORDS,
        "at_a_time": SLOTS,
        "most_output_tokens": MOST_TOKENS,
        "context_tokens": CONTEXT_TOKENS,
        "seed": seed,
    }
    return Recording(header, conditions, steps)


def show(report: Report) -> None:
    """Print it."""
    fitted = report.fitted
    print(f"steps: {report.steps}")
    print(f"C {fitted.base_s * 1e3:.1f} ms, t_l {fitted.per_token_s * 1e6:.2f} us, ", end="")
    print(f"t_r {fitted.per_request_s * 1e3:.3f} ms, t_p {fitted.per_prompt_token_s * 1e3:.3f} ms")
    print(f"further terms: {fitted.extras or 'none'}; known: {', '.join(fitted.known)}")
    print(
        f"explains {report.explained:.1%} of the variance (C and t_l alone {report.by_tokens:.1%})"
    )
    for kind, error in report.errors.items():
        print(f"median error of the next step, {kind}: {error:.1%}")


if __name__ == "__main__":
    main()
