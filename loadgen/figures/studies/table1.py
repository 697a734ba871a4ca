"""Table 1 of arXiv 2601.17855, on both traces, with every policy and kind of look-ahead."""

from collections.abc import Iterator, Mapping
from itertools import product
from types import MappingProxyType

from loadgen.figures.cases import Case
from loadgen.figures.samples import Claim, Outcomes, at_most
from loadgen.figures.study import (
    GREEDY,
    GREEDY_ORACLE,
    NONE,
    TRACE_NAMES,
    WAYS,
    Study,
    config,
)
from loadgen.figures.tables import (
    ENERGY,
    IMBALANCE,
    LONGEST_WAIT,
    MEAN_LOAD,
    PROMPT,
    THROUGHPUT,
    TPOT,
    Table,
    chosen_parameters,
    metric_table,
)

_COLUMNS = (IMBALANCE, THROUGHPUT, TPOT, ENERGY, MEAN_LOAD, PROMPT, LONGEST_WAIT)
# As printed: imbalance in 1e4 tokens, throughput in 1e4 tok/s, TPOT in ms, energy in kJ.
PRINTED: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "fcfs": (27.9, 8.00, 14.2, 396),
        "jsq": (28.2, 7.99, 14.2, 396),
        GREEDY: (2.92, 9.03, 12.6, 386),
        GREEDY_ORACLE: (1.65, 9.13, 12.5, 383),
    }
)


def _side_by_side(outcomes: Outcomes) -> Table:
    columns = (IMBALANCE, THROUGHPUT, PROMPT)
    rows = [
        [way, *(column.cell(outcomes[trace, way]) for trace in TRACE_NAMES for column in columns)]
        for way in WAYS
    ]
    titles = [column.title for column in columns]
    header = ["policy"]
    for name in TRACE_NAMES.values():
        header += [f"{name}: {titles[0]}", *titles[1:]]
    return Table(header, rows, "Both traces")


def _printed(outcomes: Outcomes) -> Table:
    """BurstGPT lengths beside the paper's figures; the runs differ in length."""
    columns = (IMBALANCE, THROUGHPUT, TPOT)
    header = ["policy", *(f"{column.title}: here, printed" for column in columns)]
    rows = []
    for way, printed in PRINTED.items():
        sample = outcomes["burstgpt", way]
        pairs = zip(columns, printed, strict=False)
        cells = [f"{sample.mean(each.metric) / each.unit:.2f}, {value:g}" for each, value in pairs]
        rows.append([way, *cells])
    return Table(header, rows, "Beside the paper's Table 1 (BurstGPT lengths)")


class Table1Study(Study):
    title = "Table 1"
    conditions = (
        "G=16 workers, B=72 slots, 128 requests always waiting, step time 4.95 ms + 9.5e-8 s per "
        "KV token of the fullest worker, 4,500 steps of which the first 500 are left out."
    )

    def cases(self) -> Iterator[Case]:
        for trace, way in product(TRACE_NAMES, WAYS):
            yield Case((trace, way), config(trace, way))

    def tables(self, outcomes: Outcomes) -> list[Table]:
        tables = []
        for trace, name in TRACE_NAMES.items():
            samples = [(way, outcomes[trace, way]) for way in WAYS]
            table = metric_table(name, "policy", samples, _COLUMNS)
            rows = [
                [*row, chosen_parameters(sample)]
                for row, (_, sample) in zip(table.rows, samples, strict=True)
            ]
            tables.append(Table([*table.header, "H, γ, μ, lead in force"], rows, name))
        return [_side_by_side(outcomes), *tables, _printed(outcomes)]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for trace, name in TRACE_NAMES.items():
            ratio = outcomes[trace, NONE].ratio(outcomes[trace, GREEDY_ORACLE], IMBALANCE.metric)
            yield at_most(f"{name}, G=16: imbalance, {NONE} / {GREEDY_ORACLE}", ratio, 1.0)

    def words(self, outcomes: Outcomes) -> str:
        return (
            "Deferring long prompts lowers the load and flatters imbalance and throughput alike: "
            "see mean load and mean admitted prompt. Without memory pressure vLLM's score of 2026 "
            "is join-the-shortest-queue. Energy is that of the steps shown, by the paper's power "
            "model."
        )
