"""A diagnosis as a table for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.diagnose.analysis.before_after import Comparison
from loadgen.diagnose.analysis.findings import Figures
from loadgen.diagnose.analysis.window import Window
from loadgen.diagnose.diagnosis import Diagnosis
from loadgen.diagnose.words import HEADLINES, answers
from loadgen.report.numbers import number, plain_table
from router.core.types import Dispatch

_COLUMNS = ("imbalance", "idle share", "tok/s", "step, ms")
# In the order of the fields of ``Figures``.
_FIGURES = (("imbalance, tokens", 1.0), ("idle share, %", 100.0), ("tok/s", 1.0), ("step, ms", 1e3))


def diagnosis_table(diagnosis: Diagnosis, compared: Comparison | None) -> RenderableType:
    """The verdict, questions with their answers, the policies, the comparison."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for question, answer in answers(diagnosis):
        table.add_row(question, answer)
    parts: list[RenderableType] = [
        Text(HEADLINES[diagnosis.verdict.word], style="bold"),
        *map(Text, diagnosis.verdict.reasons),
        Text(),
        Text(_conditions(diagnosis.window)),
        table,
    ]
    if diagnosis.prospects is not None:
        caching = any(each.caching for each in diagnosis.prospects.all)
        more = ("cached", "TTFT, s") if caching else ("J/token, model",)
        policies = plain_table("predicted (* in force)", *_COLUMNS, *more)
        measured = diagnosis.found.waiting.figures
        assert measured is not None  # Otherwise nothing is simulated.
        caches = diagnosis.found.caches
        found = [f"{caches.cached_share:.1%}", number(caches.ttft_s, 3)] if caching else []
        policies.add_row("measured now", *_cells(measured), *found, style="bold")
        for each in diagnosis.prospects.all:
            name = f"{each.name} *" if each.current else each.name
            found = [number(each.energy_j_per_token)]
            if each.caching is not None:
                found = [f"{each.caching.cached_share:.1%}", number(each.caching.ttft_s, 3)]
            policies.add_row(name, *_cells(each.predicted), *found)
        parts += [Text(), policies]
    if compared is not None:
        switch = f"After the switch from {compared.before or 'another balancer'} to "
        parts += [Text(), Text(f"{switch}{compared.policy}:"), _compared(compared)]
        if compared.load:
            parts.append(Text("The load has changed, so the prediction was for another one:"))
        parts += map(Text, compared.load)
    return Group(*parts)


def _conditions(window: Window) -> str:
    policy = _rule(window.policy, window.dispatch)
    others = f" (not: {', '.join(window.others)})" if window.others else ""
    cut = "" if window.complete else "; lines are missing, the figures are of the rest"
    text = (
        f"Group {window.group}{others} under {policy}: {len(window.workers)} workers, "
        f"{window.steps:,} steps in {window.elapsed_s:.1f} s{cut}."
    )
    if not window.changes:
        return text
    last, often = window.changes[-1], len(window.changes)
    times = "" if often == 1 else f" {often} times, the last time"
    return (
        f"{text} The policy changed{times} after {last.after_s:.1f} s, from "
        f"{_rule(last.policy, last.dispatch)}: the figures are of the time since. Give --start and "
        "--seconds of a recording for the time before."
    )


def _rule(policy: str | None, dispatch: Dispatch | None) -> str:
    if policy is None:
        return "an unknown balancer"
    return policy + (f", {dispatch.value}" if dispatch else "")


def _cells(figures: Figures) -> list[str]:
    return [
        number(figures.imbalance_tokens),
        f"{figures.idle_share:.2%}",
        number(figures.throughput_tok_s),
        f"{figures.step_s * 1e3:.2f}",
    ]


def _compared(compared: Comparison) -> Table:
    table = Table(
        *("", "before", "predicted", "measured", "gain predicted", "measured", "off by"),
        box=None,
        pad_edge=False,
    )
    for (label, scale), each in zip(_FIGURES, compared.changes.values(), strict=True):
        values = (each.before, each.predicted, each.measured)
        gains = (each.predicted_gain, each.measured_gain)
        off = "-" if each.gain_error is None else f"{each.gain_error:+.0%}"
        table.add_row(label, *(number(scale * value) for value in (*values, *gains)), off)
    return table
