"""Entrants' places in each workload, from the league's kept parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import isinf
from pathlib import Path
from typing import Any

from loadgen.report.intervals import Estimate, estimate, paired
from tests.bench.league.entrants import ONCE
from tests.bench.league.parts import DATA, OURS, kept_parts
from tests.bench.league.workloads import WORKLOADS, Workload

# Evenstep leads where its figure is at most so much worse than the first one's.
LEADS = 0.03
# Entrants that fail so many more of the requests than the best one stand after all others, however
# fast the rest was: what fails is no load.
MOST_FAILED = 0.01
# Who serves less than this share of the best one's tokens/s in an open workload is overloaded.
KEEPS_UP = 0.95


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of the tables: the value over ``unit``, or of ``value``."""

    title: str
    key: str
    unit: float = 1.0
    digits: int = 0
    interval: bool = True


COLUMNS = (
    Column("TTFT mean, ms", "mean_ttft_ms"),
    Column("TTFT p99, ms", "p99_ttft_ms"),
    Column("TPOT mean, ms", "mean_tpot_ms", digits=1),
    Column("TPOT p99, ms", "p99_tpot_ms", digits=1),
    Column("whole answer mean, s", "mean_e2el_ms", 1e3, 2),
    Column("whole answer p99, s", "p99_e2el_ms", 1e3, 2),
    Column("tokens/s", "tokens_per_s"),
    Column("good/s", "goodput_per_s", digits=1),
    Column("cache hits, %", "hit_share", 0.01, 1),
    Column("idle, %", "idle_share", 0.01, 1),
    Column("failed", "failed", digits=1, interval=False),
    Column("router CPU, s", "router_cpu_s", digits=1, interval=False),
    Column("MB", "router_memory_mb", interval=False),
)
# Figures in which evenstep's place is told, and all in which it may be behind.
PLACED = ("mean_ttft_ms", "mean_tpot_ms", "-goodput_per_s", "-tokens_per_s")
JUDGED = (
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_e2el_ms",
    "-tokens_per_s",
    "-goodput_per_s",
)


@dataclass(frozen=True, slots=True)
class Standing:
    """An entrant in one workload: the parts of its seeds, in their order."""

    entrant: str
    parts: Sequence[Mapping[str, Any]]
    seeds: Sequence[int]

    def of(self, key: str) -> Estimate | None:
        """Mean over seeds; None: some seed has no such figure."""
        values = [part.get(key) for part in self.parts]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        return estimate(numbers) if len(numbers) == len(values) else None

    @property
    def failed_share(self) -> float:
        asked = sum(part["completed"] + part["failed"] for part in self.parts)
        return float(sum(part["failed"] for part in self.parts) / max(asked, 1))

    @property
    def busy(self) -> bool:
        return any(part["busy"] for part in self.parts)

    @property
    def peer(self) -> bool:
        """Whether it is another product."""
        return self.entrant.partition(" ")[0] != OURS


Tables = Sequence[tuple[Workload, Sequence[Standing]]]


def tables_of(
    folder: Path = DATA, workloads: Mapping[str, Workload] = WORKLOADS, *, once: bool = False
) -> Tables:
    """Every workload with parts; those of other requests are left out.

    Args:
        folder: of the parts.
        workloads: that may have some.
        once: those of evenstep and of the rules that run once; False: those that are judged.
    """
    found = []
    for workload in workloads.values():
        kept = {
            name: part
            for name, part in kept_parts(workload.name, folder).items()
            if _belongs(name.rpartition(", seed ")[0], once=once)
            and part["requests_are"] == _fingerprint(workload, int(name.rpartition(" ")[2]))
        }
        table = standings(workload, kept) if kept else []
        if (table and not once) or {each.entrant for each in table} - {OURS}:
            found.append((workload, table))
    return found


def _belongs(entrant: str, *, once: bool) -> bool:
    return (entrant in ONCE) == once or entrant == OURS


@cache
def _fingerprint(workload: Workload, seed: int) -> str:
    return workload.fingerprint(seed)


def standings(workload: Workload, parts: Mapping[str, Mapping[str, Any]]) -> list[Standing]:
    """Entrants, the best first, by the seeds that all of them have had (else by all)."""
    by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    for name, part in parts.items():
        entrant, _, seed = name.rpartition(", seed ")
        by_name.setdefault(entrant, {})[int(seed)] = part
    common = set.intersection(*map(set, by_name.values()))
    found = []
    for name, each in by_name.items():
        seeds = sorted(common or each)
        found.append(Standing(name, [each[seed] for seed in seeds], seeds))
    return sorted(found, key=partial(_order, workload, _most_failed(found)))


def _order(workload: Workload, most_failed: float, each: Standing) -> tuple[bool, float, float]:
    ttft = each.of("mean_ttft_ms")
    value = worth(workload.first_by, each)
    fails = each.failed_share > most_failed
    return fails, value, float("inf") if ttft is None else ttft.mean


def _most_failed(found: Sequence[Standing]) -> float:
    """The share of failed requests from which on an entrant stands last."""
    return MOST_FAILED + min(each.failed_share for each in found)


def worth(by: str, each: Standing) -> float:
    """A figure, the less the better; ``-`` before it: the more."""
    found = each.of(by.removeprefix("-"))
    if found is None:
        return float("inf")
    return -found.mean if by.startswith("-") else found.mean


@dataclass(frozen=True, slots=True)
class Verdict:
    """Evenstep's place by a figure.

    Attributes:
        workload: in which.
        by: the figure; ``-`` before it: the most is first.
        place: from 1.
        of: so many entrants.
        first: the first of them.
        ours: evenstep's defaults.
        difference: by which share it is worse than the first, the mean of each seed's share.
        peer: the first one of another product, if there is one.
        overloaded: whether all other products serve less of an open workload than they get.
    """

    workload: Workload
    by: str
    place: int
    of: int
    first: Standing
    ours: Standing
    difference: Estimate
    peer: Standing | None = None
    overloaded: bool = False

    @property
    def behind(self) -> float:
        return self.difference.mean

    @property
    def leads(self) -> bool:
        return self.behind <= LEADS

    @property
    def told_apart(self) -> bool:
        """Whether its interval, if there is one, leaves out that both are equal."""
        half = self.difference.half_width
        return half is None or abs(self.behind) > half

    @property
    def nothing(self) -> bool:
        """Whether evenstep served nothing of what counts."""
        return self.by.startswith("-") and not worth(self.by, self.ours)

    @property
    def ahead(self) -> float | None:
        """How many times as good it is as the best other product; None: that has no such figure."""
        if self.peer is None:
            return None
        ours, other = worth(self.by, self.ours), worth(self.by, self.peer)
        better, worse = (ours, other) if self.by.startswith("-") else (other, ours)
        return None if not worse or isinf(other) else abs(better / worse)


def verdict(workload: Workload, found: Sequence[Standing], by: str = "") -> Verdict | None:
    """By the figure that orders the workload, or by another; None: evenstep has no such figure."""
    by = by or workload.first_by
    most = _most_failed(found)
    ranked = sorted(found, key=lambda each: (each.failed_share > most, worth(by, each)))
    place = next((n for n, each in enumerate(ranked) if each.entrant == OURS), None)
    if place is None or ranked[place].of(by.removeprefix("-")) is None:
        return None
    first, ours = ranked[0], ranked[place]
    difference = _difference(by, ours, first)
    if ours.failed_share > most >= first.failed_share:
        difference = Estimate(max(difference.mean, 1.0), None)
    peer = next((each for each in ranked if each.peer), None)
    all_of = place + 1, len(ranked), first, ours, difference, peer
    return Verdict(workload, by, *all_of, overloaded(workload, found))


def _difference(by: str, ours: Standing, first: Standing) -> Estimate:
    """By which share one is worse than the other: of pairs of one seed, with equal requests."""
    key = by.removeprefix("-")
    known = dict(zip(first.seeds, first.parts, strict=True))
    pairs = [
        (part[key], known[seed][key])
        for seed, part in zip(ours.seeds, ours.parts, strict=True)
        if isinstance(known.get(seed, {}).get(key), int | float)
    ]
    if not pairs:
        mine, other = worth(by, ours), worth(by, first)
        return Estimate((mine - other) / abs(other) if other and not isinf(other) else 0.0, None)
    found = paired(*zip(*pairs, strict=True))
    return replace(found, mean=-found.mean) if by.startswith("-") else found


def overloaded(workload: Workload, found: Sequence[Standing]) -> bool:
    """Whether all other products are, in a workload of requests that wait for no answer."""
    served = [(each.peer, each.of("tokens_per_s")) for each in found]
    others = [told.mean for peer, told in served if peer and told is not None]
    most = max((told.mean for _, told in served if told is not None), default=0.0)
    return workload.open and bool(others) and max(others) < KEEPS_UP * most


def behind(tables: Tables) -> list[Verdict]:
    """Where evenstep is behind in any figure, the furthest first."""
    judged = [
        each
        for workload, found in tables
        for by in dict.fromkeys((workload.first_by, *JUDGED))
        if (each := verdict(workload, found, by)) is not None and not each.leads
    ]
    return sorted(judged, key=lambda each: -each.behind)
