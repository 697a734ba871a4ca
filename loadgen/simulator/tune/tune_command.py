"""``evenstep tune``: the best H, gamma, mu and lead for a trace, beside those of the rule."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import fmean
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from loadgen.model.measured_step_time import load_step_time
from loadgen.report.numbers import number, plain_table
from loadgen.run.options import StepTimeFlag, flag
from loadgen.run.simulation_options import (
    JsonFlag,
    LengthsFlag,
    LookaheadFlag,
    SlotsFlag,
    TraceFlag,
    WorkersFlag,
    length_source,
)
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.tune.tune_search import Search, Setting, Tell, Trial, Tuned, each_of
from router.commands.json_output import STDOUT, write_json
from router.core.errors import ConfigError
from router.core.forecast.look_ahead import SIGNALS

STATEMENT = "Simulated with requests always waiting; the step time is a model, not your engine's."
_METRICS = {"imbalance": "imbalance_tokens", "throughput": "throughput_tok_s"}


def tune(
    trace: TraceFlag = None,
    lengths: LengthsFlag = None,
    workers: WorkersFlag = 16,
    slots: SlotsFlag = 72,
    pool: Annotated[int | None, flag("Requests kept waiting [128 or 4 G].", "N")] = None,
    lookahead: LookaheadFlag = "none",
    step_time: StepTimeFlag = "4.95e-3,9.5e-8",
    steps: Annotated[int, flag("Steps of each simulation.", "N")] = 1200,
    warmup: Annotated[int | None, flag("Of these, left out [a quarter].", "N")] = None,
    seeds: Annotated[int, flag("In the search; as many again for the comparison.", "N", 2)] = 4,
    json_file: JsonFlag = None,
) -> None:
    """Search the best H, gamma, mu and lead by short simulations; compare with the rule's."""
    config = DecodeConfig(
        policy="bfio",
        lengths=length_source(trace, lengths),
        workers=workers,
        slots=slots,
        pool=max(128, 4 * workers) if pool is None else pool,
        knowledge=Knowledge.parse(lookahead),
        step_time=load_step_time(step_time),
        steps=steps,
        warmup=steps // 4 if warmup is None else warmup,
    )
    if workers < 2:
        raise ConfigError("--workers: one alone has nothing to balance; give 2 or more")
    console = Console(stderr=True)
    tuned = tune_config(config, seeds, lambda line: console.print(line, highlight=False))
    Console(stderr=json_file == STDOUT).print(tuned_table(config, tuned))
    write_json(report(config, tuned), json_file)


def tune_config(config: DecodeConfig, seeds: int, tell: Tell) -> Tuned:
    """Search the parameters for one workload; deterministic."""

    def measure(setting: Setting | None, seed: int) -> Trial:
        chosen = replace(config, seed=seed)
        if setting is not None:
            chosen = replace(chosen, **asdict(setting))
        result = simulate(chosen)
        used: dict[str, Any] = {name: result.parameters[name] for name in Setting.__slots__}
        return Trial(result.avg_imbalance_tokens, result.throughput_tok_s, Setting(**used))

    return Search(measure, seeds, config.knowledge.kind != "none", tell).run()


def tuned_table(config: DecodeConfig, tuned: Tuned) -> Table:
    """Return a table of the rule and the best, with advice."""
    table = plain_table("", "H", "gamma", "mu", "lead", "imbalance", "tok/s")
    for name, trials in (("the rule", tuned.rule_trials), ("the best", tuned.best_trials)):
        figures = (fmean(each_of(trials, metric)) for metric in _METRICS.values())
        table.add_row(name, *map(number, (*asdict(trials[-1].used).values(), *figures)))
    shares = (tuned.difference(metric) for metric in _METRICS.values())
    told = [f"{share.mean:+.1%} ± {share.half_width or 0:.1%}" for share in shares]
    table.add_row("difference", *[""] * 4, *told)
    table.caption = "\n".join(advice(config, tuned))
    table.caption_justify = "left"
    return table


def advice(config: DecodeConfig, tuned: Tuned) -> list[str]:
    """Return the meaning of the figures, and the flags to use."""
    count = len(tuned.rule_trials)
    lines = [
        f"Difference: mean of {count} fresh seeds, paired, with its 95 % interval. {STATEMENT}"
    ]
    if not tuned.change:
        return [*lines, "Keep the rule: nothing better is certain. Its choice needs no flags."]
    look_ahead = f"--lookahead {config.knowledge}"
    lines.append(f"evenstep simulate decode {look_ahead} {tuned.best.simulation_flags}")
    if str(config.knowledge) in SIGNALS:
        return [*lines, f"evenstep serve {look_ahead} {tuned.best.flags}"]
    return [*lines, f"Live there is no look-ahead like {config.knowledge}: no flags for serve."]


def report(config: DecodeConfig, tuned: Tuned) -> dict[str, object]:
    """Return all results, JSON-able."""
    sides = {"rule": tuned.rule_trials, "best": tuned.best_trials}
    return {
        "statement": STATEMENT,
        "conditions": {name: value for name, value in config.described().items() if name != "seed"},
        **{
            name: {"parameters": asdict(trials[-1].used)}
            | {metric: each_of(trials, metric) for metric in _METRICS.values()}
            for name, trials in sides.items()
        },
        "difference": {name: asdict(tuned.difference(each)) for name, each in _METRICS.items()},
        "change": tuned.change,
        "flags": tuned.best.simulation_flags if tuned.change else "",
        "tried": [
            asdict(setting) | {"imbalance_tokens": tokens}
            for setting, tokens in sorted(tuned.tried.items(), key=lambda pair: pair[1])
        ],
    }
