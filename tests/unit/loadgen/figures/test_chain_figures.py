"""The simulated figures of server chains."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import typer

import loadgen.chains.chains_command
from loadgen.chains.chains_config import Blocks, ChainsOptions
from loadgen.figures.chain_cases import LOWER, RESPONSE, ChainCase, Computed, worst_ratio
from loadgen.figures.fingerprints import CHAIN_FOLDERS, fingerprint
from loadgen.figures.laboratory import Bench
from loadgen.figures.samples import Outcomes, Sample
from loadgen.figures.studies import STUDIES
from loadgen.figures.studies import chain_parts as parts
from loadgen.figures.trials import Trial
from router.commands.json_output import finite
from router.core.errors import InputError
from router.core.placement.model import Chain

TINY = ChainsOptions(requests=200, warmup=20)


class Remembering:
    """A laboratory that runs nothing."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def run(self, trials: Sequence[Trial]) -> Outcomes:
        self.trials += trials
        return {}


def chain_cases() -> Iterator[ChainCase]:
    for study in (each for name, each in STUDIES.items() if name.startswith("chain_")):
        laboratory = Remembering()
        study.measure(laboratory)
        yield from (trial for trial in laboratory.trials if isinstance(trial, ChainCase))


def test_commands_give_the_chain_cases_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ChainsOptions] = []

    def remember(options: ChainsOptions) -> None:
        asked.append(options)
        raise InputError("enough")

    monkeypatch.setattr(loadgen.chains.chains_command, "compare", remember)
    app = typer.Typer()
    app.command()(loadgen.chains.chains_command.chains)
    cases = list(chain_cases())
    assert len(cases) > 100
    for case in cases:
        with pytest.raises(InputError):
            app(shlex.split(case.command)[3:], standalone_mode=False)
        assert asked[-1] == replace(case.options, repeats=1), case.command


def test_a_deployment_without_room_has_no_figures(tmp_path: Path) -> None:
    cases = [
        ChainCase(("whole",), replace(TINY, placement=Blocks.WHOLE), seeds=1),
        ChainCase(("chained",), TINY, seeds=2),
    ]
    found = Bench(tmp_path, 1).run(cases)
    assert found[("whole",)].of(RESPONSE) is None
    assert found[("whole",)].each("no_chain") == [1]
    chained = found[("chained",)]
    assert chained.each("no_chain") == [0, 0]
    assert len({*chained.each(RESPONSE)}) == 2
    assert chained.mean(LOWER) == pytest.approx(chained.mean(RESPONSE), rel=0.5)


def test_runs_are_named_by_all_that_they_depend_on() -> None:
    case = ChainCase(("a",), TINY)
    computed = Computed(("a",), parts.allocated, (), {"share": 10})
    trials: list[Trial] = [
        case,
        replace(case, options=replace(TINY, policy="sed")),
        replace(case, options=replace(TINY, placement=Blocks.BPRR)),
        computed,
        replace(computed, arguments={"share": 20}),
        replace(computed, function=parts.responded),
    ]
    names = {fingerprint(trial.depends_on(seed), trial.code) for trial in trials for seed in (0, 1)}
    assert len(names) == 2 * len(trials)
    assert computed.code == (*CHAIN_FOLDERS, "loadgen/figures/studies/chain_parts.py")


def test_quick_runs_are_fewer_and_shorter() -> None:
    case = ChainCase(("a",), ChainsOptions()).shortened()
    assert (case.options.requests, case.options.warmup, case.seeds) == (800, 80, 2)
    assert Computed(("a",), parts.allocated, ()).shortened().seeds == 2


def test_job_servers_are_the_fastest_first() -> None:
    slow, fast = Chain((0,), (1,), 2.0, 5), Chain((1,), (1,), 1.0, 2)
    slots = [chain.slots for chain in (slow, fast)]
    wanted = {1.0: 1, 1.5: 2, 2.0: 2, 2.1: 3, 4.5: 7, 4.6: None}
    for rate, count in wanted.items():
        assert parts.job_servers([slow, fast], slots, rate) == count


def test_random_placements_are_no_better_and_all_of_them_are_counted() -> None:
    for memory in (parts.EQUAL, parts.UNEQUAL):
        found = parts.compared(0, memory, 10)
        assert found["least"] <= found["median"] <= found["most"]
        assert found[parts.GBP_CR] <= found["least"]
        assert found["share_feasible"] > 0.9


def test_what_cannot_keep_up_is_missing() -> None:
    assert set(parts.responded(0, 5.0, 3).values()) == {None}
    found = parts.responded(0, 0.2, 7)
    assert found[LOWER] == pytest.approx(found[RESPONSE], rel=0.1)
    assert finite(math.inf) is None
    sample = Sample({"a": (1.0, None, 6.0), "b": (2.0, 1.0, 3.0)})
    assert worst_ratio(sample, "a", "b") == 2.0


def made_up(rows: Mapping[int, Mapping[str, float]]) -> Outcomes:
    """Each metric is 9 but where said; ``rows``: by reserved slots."""
    metrics = tuple(column.metric for column in parts.TIMES)
    return {
        (f"{rate:g}/s", f"c={c}"): Sample(
            {metric: (rows.get(c, {}).get(metric, 9.0),) for metric in metrics}
        )
        for rate in parts.RATES
        for c in parts.CHOICES
    }


def test_a_choice_is_held_against_the_best_simulated() -> None:
    outcomes = made_up({4: {RESPONSE: 2.0}, 5: {RESPONSE: 2.5, LOWER: 1.0}})
    rate = parts.RATES[0]
    assert [parts.CHOICES[at] for at in parts.chosen(outcomes, rate, LOWER)] == [5]
    assert parts.beside_best(outcomes, rate, LOWER) == [1.25]
    claims = {claim.text: claim.met for claim in STUDIES["chain_reserve"].claims(outcomes)}
    assert claims["0.05/s: simulated time at the c of the lower bound / least simulated"] is False
    assert claims["all rates: simulated time, c of the lower bound / of the upper bound"] is True


def test_jffc_is_held_against_the_best_of_the_others() -> None:
    laboratory = Remembering()
    STUDIES["chain_policies"].measure(laboratory)
    values = dict.fromkeys(ChainCase.metrics, (2.0, 2.0))
    outcomes = {trial.key: Sample(values) for trial in laboratory.trials}
    text = "load 10 %: mean response time, jffc / the best of the others"
    for sed_s, met in ((1.99, True), (1.9, False)):
        outcomes["10 %", "sed"] = Sample(values | {RESPONSE: (sed_s, sed_s)})
        claims = {claim.text: claim.met for claim in STUDIES["chain_policies"].claims(outcomes)}
        assert claims[text] is met
