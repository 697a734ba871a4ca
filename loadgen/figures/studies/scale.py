"""BF-IO and baselines from 16 to 256 workers (BurstGPT lengths)."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from loadgen.figures.cases import Case
from loadgen.figures.samples import Claim, Outcomes, at_least, at_most
from loadgen.figures.study import GREEDY, GREEDY_ORACLE, NONE, ORACLE, Study, config
from loadgen.figures.tables import (
    IMBALANCE,
    MEAN_LOAD,
    PROMPT,
    THROUGHPUT,
    TPOT,
    Table,
    metric_table,
)
from loadgen.figures.trials import SEEDS
from loadgen.report.charts import draw_line, finish, legend, panels, save

WORKERS = (16, 32, 64, 128, 256)
FEWER_SEEDS, MORE_SEEDS = 3, 10
_WAYS = ("fcfs", GREEDY, GREEDY_ORACLE, NONE, ORACLE)
_GREEDY_UP_TO = 64
_REQUIRED_WORKERS = 32
GAIN_AT_128 = 0.22


class ScaleStudy(Study):
    title = "From 16 to 256 workers"
    conditions = (
        "BurstGPT lengths, B=72. G=16 and 32: pool 128, 4,500 steps; above: pool 4 G, 1,500 steps. "
        f"The first 500 steps are left out. {SEEDS} seeds, from G=128 on {FEWER_SEEDS}; "
        f"{MORE_SEEDS} for fcfs at G=32, which varies most from seed to seed. The greedy's "
        f"simulation is slow: up to G={_GREEDY_UP_TO} only."
    )

    def cases(self) -> Iterator[Case]:
        for workers, way in product(WORKERS, _WAYS):
            if workers > _GREEDY_UP_TO and "balance_route" in way:
                continue
            large = workers > _REQUIRED_WORKERS
            changes = {"pool": 4 * workers, "steps": 1500} if large else {}
            seeds = FEWER_SEEDS if workers >= 128 else SEEDS
            if (workers, way) == (_REQUIRED_WORKERS, "fcfs"):
                seeds = MORE_SEEDS
            run = config("burstgpt", way, workers=workers, **changes)
            yield Case((str(workers), way), run, seeds=seeds)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        samples = [(f"G={workers}, {way}", each) for (workers, way), each in outcomes.items()]
        columns = (IMBALANCE, THROUGHPUT, TPOT, MEAN_LOAD, PROMPT)
        return [metric_table("", "workers, policy", samples, columns)]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        metric = IMBALANCE.metric
        for workers in WORKERS:
            ours, first = outcomes[str(workers), NONE], outcomes[str(workers), "fcfs"]
            text = f"BurstGPT lengths, G={workers}: imbalance, {{}} / fcfs"
            yield at_most(text.format(NONE), ours.ratio(first, metric), 1.0)
            oracle = outcomes[str(workers), ORACLE]
            yield at_most(text.format(ORACLE), oracle.ratio(first, metric), 1.0)
            if workers in (32, 64):
                greedy = outcomes[str(workers), GREEDY_ORACLE]
                text = f"BurstGPT lengths, G={workers}: imbalance, {NONE} / {GREEDY_ORACLE}"
                yield at_most(text, ours.ratio(greedy, metric), 1.0)
        gain = outcomes["128", NONE].ratio(outcomes["128", "fcfs"], THROUGHPUT.metric) - 1
        text = f"BurstGPT lengths, G=128: gain in throughput of {NONE} over fcfs"
        yield at_least(text, gain, GAIN_AT_128)

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, (left, right) = panels(2)
        for style, way in enumerate(_WAYS):
            present = [workers for workers in WORKERS if (str(workers), way) in outcomes]
            samples = [outcomes[str(workers), way] for workers in present]
            for axes, column in ((left, IMBALANCE), (right, THROUGHPUT)):
                draw_line(axes, column.line(way, present, samples, style))
        for axes, column in ((left, IMBALANCE), (right, THROUGHPUT)):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(WORKERS, [str(workers) for workers in WORKERS])
            finish(axes, "workers G", column.title)
        legend(left)
        save(figure, path, "simulated; BurstGPT lengths, B=72, pool 128 up to G=32, then 4 G")
