"""The authors' released code against ``balance_route`` here, by the release's own protocol.

The release's "BF-IO" is the greedy choice by F-scores (arXiv 2605.06113), not the integer program.
It reveals 4 G requests at a time. Its averages run from the start with empty workers until the last
request is assigned. It takes the imbalance after requests have ended and before their slots are
refilled.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from loadgen.figures.cases import BEFORE_REFILL, Case, trace_lengths
from loadgen.figures.samples import Claim, Outcomes, within
from loadgen.figures.study import GREEDY, GREEDY_ORACLE, TRACE_NAMES, Study, config
from loadgen.figures.tables import IMBALANCE, THROUGHPUT, Column, Table

REQUESTS = 60_000
SLOTS = 72
TOLERANCE = 0.10
# (trace, G, way): imbalance in tokens and tok/s of the release on the same lengths.
RELEASE: Mapping[tuple[str, int, str], tuple[float, float | None]] = MappingProxyType(
    {
        ("burstgpt", 16, "fcfs"): (28.5e4, 8.05e4),
        ("burstgpt", 16, "jsq"): (28.2e4, 8.06e4),
        ("burstgpt", 16, GREEDY): (2.79e4, 9.23e4),
        ("burstgpt", 16, GREEDY_ORACLE): (1.72e4, 9.28e4),
        ("azure-conv", 16, "fcfs"): (17.9e4, None),
        ("azure-conv", 16, GREEDY): (3.07e4, None),
        ("azure-conv", 16, GREEDY_ORACLE): (2.95e4, None),
        ("burstgpt", 64, "fcfs"): (155e4, None),
        ("burstgpt", 64, GREEDY): (22.7e4, None),
        ("burstgpt", 64, GREEDY_ORACLE): (9.0e4, None),
    }
)
_THEIRS = Column("imbalance before refill, 10⁴ tokens", BEFORE_REFILL, 1e4)
# At G=64 such a run is nearly all start; the study also shows twice as many requests.
SHOWN = (
    *((*run, REQUESTS) for run in RELEASE),
    *(("burstgpt", 64, way, 2 * REQUESTS) for way in ("fcfs", GREEDY)),
)


def steps(trace: str, workers: int, requests: int = REQUESTS) -> int:
    """Approximate number of steps until the last request is assigned."""
    output_tokens = float(trace_lengths(trace).outputs.mean())
    return round(requests * output_tokens / (workers * SLOTS))


class ReleaseStudy(Study):
    title = "The authors' release"
    conditions = (
        f"The release's protocol: 4 G requests revealed at a time, averages from the start until "
        f"{REQUESTS:,} requests are assigned, imbalance taken after requests have ended and before "
        f"their slots are filled; B={SLOTS}. A step's own imbalance stands beside it."
    )

    def cases(self) -> Iterator[Case]:
        for trace, workers, way, requests in SHOWN:
            size = {"workers": workers, "slots": SLOTS, "pool": 4 * workers}
            until = {"steps": steps(trace, workers, requests), "warmup": 0}
            key = (trace, str(workers), way, str(requests))
            yield Case(key, config(trace, way, **size, **until), before_refill=True)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        rows = []
        for trace, workers, way, requests in SHOWN:
            targets = RELEASE[trace, workers, way]
            sample = outcomes[trace, str(workers), way, str(requests)]
            cells = [IMBALANCE.cell(sample)]
            for column, target in zip((_THEIRS, THROUGHPUT), targets, strict=True):
                cells.append(column.cell(sample))
                cells += ["–", "–"] if target is None else column.beside(sample, target)[1:]
            name = f"{TRACE_NAMES[trace]}, G={workers}, {way}, {requests:,} requests"
            rows.append([name, *cells])
        header = ["", IMBALANCE.title, _THEIRS.title, "release", "", THROUGHPUT.title]
        return [Table([*header, "release", ""], rows)]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for (trace, workers, way), (imbalance, throughput) in RELEASE.items():
            sample = outcomes[trace, str(workers), way, str(REQUESTS)]
            name = f"{TRACE_NAMES[trace]}, G={workers}, {way}, against the release"
            yield within(f"{name}: imbalance", sample, BEFORE_REFILL, imbalance, TOLERANCE)
            if throughput is not None:
                metric = THROUGHPUT.metric
                yield within(f"{name}: throughput", sample, metric, throughput, TOLERANCE)

    def words(self, outcomes: Outcomes) -> str:
        return (
            f"At G=64 {REQUESTS:,} requests are assigned in some 740 steps, while loads still "
            "grow; how many the release was given there is not known."
        )
