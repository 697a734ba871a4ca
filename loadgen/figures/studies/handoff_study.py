"""Prefill workers: computed prompts, and their KV, wait for a better assignment."""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from loadgen.figures.cases import Case
from loadgen.figures.fingerprints import HANDOFF_FOLDERS
from loadgen.figures.laboratory import Laboratory
from loadgen.figures.samples import Claim, Outcomes, Sample, at_most
from loadgen.figures.studies.arrivals_study import FORMS, OURS
from loadgen.figures.study import COMPUTING, Study, mean_output_tokens, options_of
from loadgen.figures.tables import IMBALANCE, THROUGHPUT, TPOT, TTFT, Column, Table, metric_table
from loadgen.report.charts import draw_line, finish, legend, panels, save
from loadgen.report.intervals import paired
from loadgen.simulator.decode.decode_command import DecodeOptions
from router.core.types import Dispatch

_TRACE = "burstgpt"
_WORKERS, _SLOTS, _STEPS, _SEEDS = 8, 32, 2000, 10
_PREFILL_WORKERS = 4
PERCENT = (80, 90, 100, 110)
OVERLOAD = 110
_FULL = (100, OVERLOAD, None)  # None: the pool never runs empty
BOUNDS = (14_336, 24_576, 49_152)
SIZE_ERROR = 0.25
_RIVAL = "least_tokens, pool"
_RIVALS = ("least_tokens", "jsq")
_SIZED = (OURS, _RIVAL)  # policies that consider sizes
_EARLIER: Mapping[str, Mapping[str, Any]] = {
    "to 4 more than its slots": {"overcommit": 4},
    "to 16 more than its slots": {"overcommit": 16},
    "once it is computed": {"dispatch": Dispatch.INSTANT},
}
_LATEST, _AT_ONCE = "to free slots", "once it is computed"
KEPT = Column("KV kept, 10³ tokens", "prefill_kept_mean_tokens", 1e3, 1)
MOST_KEPT = Column("most kept, 10³ tokens", "prefill_kept_max_tokens", 1e3, 1)
QUEUE = Column("in it prefill queue, s", "prefill_queue_mean_s", 1.0, 3)
WAIT = Column("hand-off wait, s", "handoff_wait_mean_s", 1.0, 3)
_COLUMNS = (IMBALANCE, THROUGHPUT, TPOT, TTFT, QUEUE, WAIT, KEPT, MOST_KEPT)


def _run(form: str, **changes: Any) -> DecodeOptions:
    settings = {"workers": _WORKERS, "slots": _SLOTS, "steps": _STEPS, **FORMS[form], **changes}
    return options_of(_TRACE, "fcfs", **settings)


def capacity_per_s(outcomes: Outcomes) -> float:
    """Requests per second that BF-IO serves when the pool never runs empty."""
    return outcomes[("capacity",)].mean("throughput_tok_s") / mean_output_tokens(_TRACE)


def _rows() -> Iterator[tuple[tuple[str, int | None, str], Mapping[str, Any]]]:
    for percent, form in product(PERCENT, FORMS):
        yield ("load", percent, form), {}
    for form in _SIZED:
        yield ("load", None, form), {}
    for percent, form in product(_FULL, _SIZED):
        yield ("estimated", percent, form), {"size_error": SIZE_ERROR}
    for tokens, form in product(BOUNDS, _SIZED):
        yield (f"memory {tokens}", OVERLOAD, form), {"prefill_kv_tokens": tokens}
    for name, changes in _EARLIER.items():
        yield (name, OVERLOAD, OURS), changes


def _load(percent: int | None) -> str:
    return "always 128 waiting" if percent is None else f"{percent}"


def _at_overload(outcomes: Outcomes, kind: str, form: str) -> Sample:
    return outcomes[kind, str(OVERLOAD), form]


def _held(outcomes: Outcomes, form: str) -> list[tuple[str, Sample]]:
    """Samples from the least memory to no bound."""
    bounded = [
        (f"{tokens:,} tokens a worker, {form}", _at_overload(outcomes, f"memory {tokens}", form))
        for tokens in BOUNDS
    ]
    return [*bounded, (f"no bound, {form}", _at_overload(outcomes, "load", form))]


def _earlier(outcomes: Outcomes) -> list[tuple[str, Sample]]:
    """Samples from the earliest binding to the latest."""
    bound = [(name, _at_overload(outcomes, name, OURS)) for name in reversed(list(_EARLIER))]
    return [*bound, (_LATEST, _at_overload(outcomes, "load", OURS))]


def _estimates_table(outcomes: Outcomes) -> Table:
    rows = []
    for percent, form in product(_FULL, _SIZED):
        load = _load(percent)
        estimated, exact = outcomes["estimated", load, form], outcomes["load", load, form]
        cells = [IMBALANCE.cell(exact), IMBALANCE.cell(estimated)]
        more = []
        for metric in (IMBALANCE.metric, THROUGHPUT.metric):
            found = paired(estimated.each(metric), exact.each(metric))
            more.append(f"{found.mean:+.1%} ± {found.half_width or 0.0:.1%}")
        unit = "" if percent is None else " %"
        rows.append([f"{load}{unit}, {form}, sizes", *cells, *more])
    imbalances = [f"{IMBALANCE.title}, {sizes}" for sizes in ("exact", "estimated")]
    header = ["load, policy and dispatch", *imbalances, "estimated over exact", "in throughput"]
    title = f"exact, and with an error of sigma {SIZE_ERROR:g} (seed by seed)"
    return Table(header, rows, f"Sizes at the hand-off: {title}")


def _better(outcomes: Outcomes, policy: str) -> Sample:
    """A baseline in the form of dispatch with less imbalance."""
    forms = [_at_overload(outcomes, "load", f"{policy}, {form.value}") for form in Dispatch]
    return min(forms, key=lambda sample: sample.mean(IMBALANCE.metric))


class HandoffStudy(Study):
    title = "Prefill workers and the hand-off"
    conditions = (
        f"BurstGPT lengths, Poisson arrivals, {_PREFILL_WORKERS} prefill workers of 100,000 prompt "
        "tokens per second and 4.95 ms a step, chunks of 2,048; KV fetched in 1 ms + 2.6 us per "
        f"token; G={_WORKERS}, B={_SLOTS}, no look-ahead. Pool: the policy sees the 128 oldest "
        "computed prompts. Instant: each is sent on once it is computed. 100 % is what BF-IO "
        f"serves with a full pool. {_STEPS:,} steps without the first 500; {_SEEDS} seeds. KV "
        "kept: of computed prompts that no decode worker has fetched yet, all prefill workers "
        "together."
    )
    code = HANDOFF_FOLDERS
    physics = COMPUTING

    def measure(self, laboratory: Laboratory) -> Outcomes:
        full = laboratory.run([Case(("capacity",), _run(OURS), seeds=_SEEDS)])
        cases = []
        for (kind, percent, form), changes in _rows():
            settings = {"prefill_workers": _PREFILL_WORKERS, "prefill_step_time": "0.00495,1e-05"}
            settings |= changes
            if percent is not None:
                rate = round(capacity_per_s(full) * percent / 100, 2)
                settings |= {"arrivals": f"poisson:{rate}", "pool": 128}
            run = _run(form, **settings)
            cases.append(Case((kind, _load(percent), form), run, seeds=_SEEDS))
        return {**laboratory.run(cases), **full}

    def tables(self, outcomes: Outcomes) -> list[Table]:
        loads = [
            (f"{percent} %, {form}", outcomes["load", str(percent), form])
            for percent, form in product(PERCENT, FORMS)
        ]
        title = f"{capacity_per_s(outcomes):,.0f} requests/s are 100 %"
        held = [row for form in _SIZED for row in _held(outcomes, form)]
        memory, bound = "memory of the prefill workers", "bfio binds a request"
        return [
            metric_table(title, "load, policy and dispatch", loads, _COLUMNS),
            metric_table(f"{OVERLOAD} %: {memory}", memory, held, _COLUMNS),
            metric_table(f"{OVERLOAD} %: when {bound}", bound, _earlier(outcomes), _COLUMNS),
            _estimates_table(outcomes),
        ]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        ours = _at_overload(outcomes, "load", OURS)
        for policy in _RIVALS:
            imbalance = ours.ratio(_better(outcomes, policy), IMBALANCE.metric)
            yield at_most(f"{OVERLOAD} %: imbalance, bfio / {policy}' better form", imbalance, 0.5)
            kept = ours.ratio(_at_overload(outcomes, "load", f"{policy}, pool"), KEPT.metric)
            yield at_most(f"{OVERLOAD} %: KV kept for decode workers, bfio / {policy}", kept, 0.8)
        at_once = ours.ratio(_at_overload(outcomes, _AT_ONCE, OURS), IMBALANCE.metric)
        text = f"{OVERLOAD} %: imbalance of bfio, bound {_LATEST} / {_AT_ONCE}"
        yield at_most(text, at_once, 0.5)
        exact = ours.ratio(_at_overload(outcomes, "estimated", OURS), IMBALANCE.metric)
        yield at_most(f"{OVERLOAD} %: imbalance of bfio, exact / estimated sizes", exact, 1.0)

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, (by_load, kept, trade) = panels(3)
        for style, form in enumerate(FORMS):
            samples = [outcomes["load", str(percent), form] for percent in PERCENT]
            for axes, column in ((by_load, IMBALANCE), (kept, KEPT)):
                draw_line(axes, column.line(form, PERCENT, samples, style))
        for name, style, samples in (
            (f"{OURS}: less memory", 0, [s for _, s in _held(outcomes, OURS)]),
            (f"{_RIVAL}: less memory", 1, [s for _, s in _held(outcomes, _RIVAL)]),
            ("bfio: bound earlier", 5, [s for _, s in _earlier(outcomes)]),
        ):
            xs = [sample.mean(KEPT.metric) / KEPT.unit for sample in samples]
            draw_line(trade, IMBALANCE.line(name, xs, samples, style))
        load = "arrivals, % of BF-IO's capacity"
        finish(by_load, load, IMBALANCE.title, "Imbalance of the decode workers")
        finish(kept, load, KEPT.title, "KV that waits for a decode worker")
        finish(trade, KEPT.title, IMBALANCE.title, f"What holding gives, at {OVERLOAD} %")
        by_load.set_ylim(0)
        trade.set_xlim(0)
        trade.set_ylim(0, 1.3 * trade.get_ylim()[1])
        legend(kept)
        legend(trade)
        caption = f"BurstGPT lengths, Poisson arrivals, {_PREFILL_WORKERS} prefill workers"
        size = f"G={_WORKERS}, B={_SLOTS}, no look-ahead; {_SEEDS} seeds"
        save(figure, path, f"simulated; {caption}, {size}")

    def words(self, outcomes: Outcomes) -> str:
        tight = _at_overload(outcomes, f"memory {BOUNDS[0]}", OURS)
        free = _at_overload(outcomes, "load", OURS)
        at_once = _at_overload(outcomes, _AT_ONCE, OURS)
        kept, imbalance = (tight.ratio(free, column.metric) for column in (KEPT, IMBALANCE))
        kept_at_once, bound = (at_once.ratio(free, column.metric) for column in (KEPT, IMBALANCE))
        return (
            f"Prefill workers of {BOUNDS[0]:,} tokens keep {kept:.2f} times the KV that they keep "
            f"without bound, and bfio's imbalance is {imbalance:.2f} times as large: the rest "
            "waits for a prefill worker, and keeps nothing. Binding requests as soon as they are "
            f"computed keeps {kept_at_once:.2f} times the KV, at {bound:.1f} times the imbalance: "
            "an engine fetches what it has queued once a slot is free, as vLLM's do. In overload "
            "what waits grows for as long as the run lasts. Nobody is held back for a better slot "
            "while there is a free one. Of sizes with an error policies see the exact ones once a "
            "request is on its decode worker."
        )
