"""The machinery of the simulated figures."""

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import typer

import loadgen.figures.cases as cases_module
import loadgen.simulator.decode.decode_command
from docs.stale_figures import DATA
from loadgen.figures.cases import BEFORE_REFILL, BeforeRefill, Case
from loadgen.figures.engine_cases import ENDLESS, AdmissionCase, ServingCase
from loadgen.figures.figures_command import figures
from loadgen.figures.figures_document import (
    document,
    json_text,
    markdown,
    outcomes_of,
    read_document,
)
from loadgen.figures.fingerprints import SERVING_FOLDERS, fingerprint
from loadgen.figures.laboratory import Bench
from loadgen.figures.samples import Outcomes, Sample, at_least, at_most, paired_at_most, within
from loadgen.figures.studies import STUDIES, scaling
from loadgen.figures.study import PAPER, Study, options_of
from loadgen.figures.tables import IMBALANCE, TTFT, Table, metric_table
from loadgen.figures.trials import Trial
from loadgen.model.power_model import PowerModel
from loadgen.report.charts import smoothed
from loadgen.report.origin import ROOT, code_hash
from loadgen.simulator.admission import admission_command
from loadgen.simulator.admission.admission_command import AdmissionOptions
from loadgen.simulator.admission.admission_simulation import AdmissionConfig
from loadgen.simulator.decode.decode_command import DecodeOptions
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_results import StepRecords
from loadgen.simulator.serving.serving_command import ServingOptions
from loadgen.traces.trace import load_trace
from router.core.errors import ConfigError, InputError
from router.core.policies.baselines import PerRequest
from router.core.policies.policy_protocol import Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.policies.prompts import kv_cost
from tests.support.core import requests, views

TINY = DecodeOptions(
    policy="least_tokens",
    lengths="geometric:50,8",
    workers=2,
    slots=4,
    pool=8,
    steps=40,
    warmup=10,
    **PAPER,
)
RECORDS = StepRecords(
    seconds=np.ones(40),
    idle_s=np.zeros(40),
    loads=np.tile([100, 50], (40, 1)),
    tokens=np.ones(40, dtype=np.int64),
    waiting=np.ones(40, dtype=np.int64),
)


def theirs(weight: float, seed: int) -> Policy:
    return PerRequest(kv_cost(weight + seed))


class MadeUp:
    """A laboratory that measures nothing: every metric is 1, 2 and 3."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def run(self, trials: Sequence[Trial]) -> Outcomes:
        self.trials += trials
        return {trial.key: _made_up(trial) for trial in trials}


def _made_up(trial: Trial) -> Sample:
    keeps = isinstance(trial, Case) and trial.keep_records
    values = dict.fromkeys(trial.metrics, (1.0, 2.0, 3.0))
    return Sample(values, "", {}, RECORDS if keeps else None)


def all_trials() -> Iterator[tuple[str, Trial]]:
    for name, study in STUDIES.items():
        laboratory = MadeUp()
        study.measure(laboratory)
        yield from ((name, trial) for trial in laboratory.trials)


def test_claims_are_met_or_missed_and_say_so() -> None:
    assert at_most("wait", 210, 210).met
    assert not at_most("wait", 211, 210).met
    assert at_least("gain", 0.22, 0.22).met
    assert not at_least("gain", 0.21, 0.22).met
    load = Sample({"load": (92, 90, 94), "low": (93, 93)})
    assert within("load", load, "low", 100, 0.07 + 1e-9).met
    assert not within("load", load, "load", 100, 0.07).met
    assert not at_most("nothing found", math.nan, 1).met
    assert at_most("wait", 211, 210).row() == ["wait", "≤ 210", "211", "**missed**"]
    row = within("load", load, "load", 100, 0.07).row()
    assert row[2:] == ["0.08 (92 ± 5, -8.0%)", "**missed**"]


def test_a_paired_claim_takes_the_upper_end_of_the_ratios() -> None:
    # Ratios of 0.96, 1.00 and 1.04: a mean of 1 ± 4.303 x 0.04 / sqrt(3).
    ours, theirs = Sample({"wait": (96, 200, 312)}), Sample({"wait": (100, 200, 300)})
    claim = paired_at_most("wait", ours, theirs, "wait", 1.1)
    assert claim.found == pytest.approx(1 + 4.303 * 0.04 / math.sqrt(3))
    assert claim.met
    assert claim.row()[2] == "1.1 (1.000 ± 0.099)"
    assert not paired_at_most("wait", ours, theirs, "wait", 1.09).met
    assert paired_at_most("wait", theirs, theirs, "wait", 1.0).met


def test_a_table_shows_means_intervals_and_gaps() -> None:
    sample = Sample({IMBALANCE.metric: (1e4, 2e4, 3e4), TTFT.metric: (None, None, None)})
    table = metric_table("Loads", "policy", [("bfio", sample), ("none", None)], [IMBALANCE, TTFT])
    assert table.markdown().splitlines() == [
        "**Loads**",
        "",
        "| policy | imbalance, 10⁴ tokens | TTFT mean, s |",
        "| --- | ---: | ---: |",
        "| bfio | 2.00 ± 2.48 | – |",
        "| none | – | – |",
    ]


def test_keys_are_unlike_within_a_study() -> None:
    keys = [(name, trial.key) for name, trial in all_trials()]
    assert len(keys) == len(set(keys))


def test_every_case_is_repeated_often_enough() -> None:
    few = {(name, trial.seeds) for name, trial in all_trials() if trial.seeds < 5}
    exceptions = {
        ("prefill", 3),
        ("scale", 3),
        ("serving_alone", 3),
        ("trajectories", 1),
        ("wait", 1),
    }
    assert few == exceptions


def test_commands_give_the_cases_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DecodeConfig] = []

    def remember(config: DecodeConfig, **_: object) -> None:
        asked.append(config)
        raise InputError("enough")

    monkeypatch.setattr(loadgen.simulator.decode.decode_command, "simulate", remember)
    monkeypatch.setattr(loadgen.simulator.decode.decode_command, "load_trace", cache(load_trace))
    app = typer.Typer()
    app.command()(loadgen.simulator.decode.decode_command.decode)
    commands = {case.command: case for _, case in all_trials() if isinstance(case, Case)}
    assert len(commands) > 100
    for command, case in commands.items():
        if command is None:
            assert case.unaware
            continue
        with pytest.raises(InputError):
            app(shlex.split(command)[3:], standalone_mode=False)
        assert asked[-1].described() == case.config(0).described(), command


def test_commands_give_the_admission_cases_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def remember(config: AdmissionConfig) -> None:
        asked.append(config.described())
        raise InputError("enough")

    monkeypatch.setattr(admission_command, "simulate_admission", remember)
    app = typer.Typer()
    app.command()(admission_command.admission)
    cases = [case for _, case in all_trials() if isinstance(case, AdmissionCase)]
    assert len(cases) > 50
    for case in cases:
        with pytest.raises(InputError):
            app(shlex.split(case.command)[3:], standalone_mode=False)
        assert [asked[-1]] == case.depends_on(0), case.command


def test_a_run_without_end_has_no_figures(tmp_path: Path) -> None:
    alpha = AdmissionOptions(
        "alpha_beta", '{"alpha": 0, "beta": 1}', "example2", rate=12, requests=60
    )
    loops, ends = (
        AdmissionCase(("0",), alpha, seeds=1),
        AdmissionCase(("1",), replace(alpha, settings='{"alpha": 0.5, "beta": 1}'), seeds=1),
    )
    found = Bench(tmp_path, 1).run([loops, ends])
    assert (found[("0",)].each(ENDLESS), found[("0",)].of("latency_mean_s")) == ([1], None)
    assert found[("1",)].each(ENDLESS) == [0]
    assert found[("1",)].mean("completed") == 60


def test_runs_are_named_by_all_that_they_depend_on() -> None:
    case = Case(("a",), TINY)
    other = replace(TINY, lengths="geometric:50,9")
    runs = [
        TINY,
        replace(TINY, horizon=3),
        other,
        replace(TINY, prefill_workers=1),
        replace(TINY, prefill_workers=2),
    ]
    cases: list[Trial] = [replace(case, options=options) for options in runs]
    cases += [replace(case, before_refill=True), replace(case, unaware=True)]
    admissions = [
        AdmissionOptions(),
        AdmissionOptions(rate=3.0),
        AdmissionOptions(settings='{"headroom": 0.1}'),
        AdmissionOptions("off"),
    ]
    cases += [AdmissionCase(("a",), options) for options in admissions]
    names = {fingerprint(case.depends_on(seed), case.code) for case in cases for seed in (0, 1)}
    assert len(names) == 2 * len(cases)
    assert fingerprint(replace(case, key=("b",), seeds=2).depends_on(0), case.code) in names


@pytest.mark.parametrize("name", STUDIES)
def test_the_code_that_names_a_run_is_there(name: str) -> None:
    laboratory = MadeUp()
    STUDIES[name].measure(laboratory)
    for path in {path for trial in laboratory.trials for path in trial.code}:
        assert (ROOT / path).exists()
        assert code_hash(path)


def test_a_policy_of_a_studys_own_is_named_by_its_numbers() -> None:
    def name(weight: float) -> str:
        options = ServingOptions(requests=60)
        case = ServingCase(("a", "tuned"), options, partial(theirs, weight))
        return fingerprint(case.depends_on(0), case.code)

    assert name(1.0) == name(1.0) != name(2.0)
    codes = {trial.code for study, trial in all_trials() if study == "serving"}
    own = "loadgen/figures/studies/serving_study.py"
    assert codes == {SERVING_FOLDERS, (*SERVING_FOLDERS, own)}


@pytest.mark.parametrize("name", STUDIES)
def test_the_header_tells_the_engines_that_the_cases_have(name: str) -> None:
    laboratory = MadeUp()
    STUDIES[name].measure(laboratory)
    physics = STUDIES[name].physics
    assert laboratory.trials
    for trial in laboratory.trials:
        if isinstance(trial, ServingCase):
            config = trial.options.config()
            told = (physics["prefix_caching"], physics["block_tokens"], physics["prompts_cost"])
            assert told == (
                True,
                config.block_tokens,
                config.step_time.per_prompt_token_s > 0,
            )
            continue
        assert (physics["prefix_caching"], physics["block_tokens"]) == (False, 1)
        if isinstance(trial, Case):
            computes = trial.options.prefill_workers or trial.options.prefill_cost
            assert physics["prompts_cost"] or not computes


def test_kept_headers_tell_the_physics_of_their_studies() -> None:
    kept = json.loads((DATA / "figures/figures.json").read_text())["studies"]
    told = {name: study["origin"].get("physics") for name, study in kept.items()}
    assert {name for name, physics in told.items() if physics} >= {
        *("prefill", "serving", "serving_budgets")
    }
    for name, physics in told.items():
        assert physics in (None, dict(STUDIES[name].physics))


@pytest.mark.parametrize("processes", [1, 2])
def test_finished_runs_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    told: list[str] = []
    bench = Bench(tmp_path, processes, tell=told.append)
    case = Case(("a", "b"), TINY, seeds=2, keep_records=True)
    found = bench.run([case])
    assert sorted(line.split(";")[0] for line in told) == [
        "1/2 a b, seed 0" if "1/2 a b, seed 0" in told[0] else "1/2 a b, seed 1",
        "2/2 a b, seed 1" if "1/2 a b, seed 0" in told[0] else "2/2 a b, seed 0",
    ]
    monkeypatch.setattr(Case, "run", None)
    again = bench.run([case])
    assert again["a", "b"].values == found["a", "b"].values
    records = again["a", "b"].records
    assert records is not None
    assert records.loads.shape == (30, 2)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\0"])
def test_a_spoilt_run_is_repeated(tmp_path: Path, text: str) -> None:
    case = Case(("a",), TINY, seeds=1)
    first = Bench(tmp_path, 1).run([case])
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert Bench(tmp_path, 1).run([case]) == first


def test_the_imbalance_before_refill_is_that_of_the_gaps(tmp_path: Path) -> None:
    one = Case(("one",), TINY, seeds=1, before_refill=True)
    found = Bench(tmp_path, 1).run([one, replace(one, key=("other",), before_refill=False)])
    assert found[("one",)].mean("steps") == found[("other",)].mean("steps")
    assert found[("one",)].mean(BEFORE_REFILL) > 0
    assert BEFORE_REFILL not in found[("other",)].values
    policy = BeforeRefill(POLICIES["jsq"].make(PolicySettings()))
    done = policy.assign(requests([10]), views([40, 70], [1, 0]))
    assert len(done) == 1
    assert policy.imbalances == [2 * 70 - 110]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_says_and_draws_what_was_found(name: str, tmp_path: Path) -> None:
    study = STUDIES[name]
    outcomes = study.measure(MadeUp())
    assert all(isinstance(table, Table) and table.rows for table in study.tables(outcomes))
    assert all(
        len(row) == len(table.header) for table in study.tables(outcomes) for row in table.rows
    )
    assert type(study).words is Study.words or study.words(outcomes)
    if study.draws:
        study.draw(outcomes, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    read = outcomes_of(json.loads(json_text(document({name: outcomes}))))
    assert markdown(read, {}) == markdown({name: outcomes}, {})


Changes = dict[tuple[str, ...], dict[str, float]]


def judged(name: str, changes: Changes) -> dict[str, bool]:
    """Claims of a study whose metrics are all 1 but for the changes."""
    outcomes = dict(STUDIES[name].measure(MadeUp()))
    for key, sample in outcomes.items():
        values = dict.fromkeys(sample.values, (1.0,))
        outcomes[key] = Sample(values | {m: (v,) for m, v in changes.get(key, {}).items()})
    return {claim.text: claim.met for claim in STUDIES[name].claims(outcomes)}


def test_deadline_claims_follow_the_numbers() -> None:
    key = ("burstgpt", "bfio, oracle", "200")
    wait, ratio = (
        "BurstGPT lengths, bfio, oracle, W=200: longest wait, steps",
        "BurstGPT lengths, bfio, oracle, W=200: imbalance / without deadline",
    )
    found = judged("deadlines", {key: {"max_pool_wait_steps": 211, "avg_imbalance_tokens": 1.5}})
    assert (found[wait], found[ratio]) == (False, True)
    found = judged("deadlines", {key: {"max_pool_wait_steps": 210, "avg_imbalance_tokens": 1.51}})
    assert (found[wait], found[ratio]) == (True, False)


def test_arrival_claims_take_the_rivals_better_form() -> None:
    better: Changes = {("burstgpt", "110", "least_tokens, instant"): {"ttft_mean_s": 0.8}}
    text = "BurstGPT lengths, 110 %: mean TTFT, bfio / least_tokens' better form"
    ours: Changes = {("burstgpt", "110", "bfio, pool"): {"ttft_mean_s": 0.09}}
    assert judged("arrivals", ours)[text]
    assert not judged("arrivals", ours | better)[text]


def test_scale_claims_follow_the_numbers() -> None:
    text = "BurstGPT lengths, G=128: gain in throughput of bfio, no look-ahead over fcfs"
    key = ("128", "bfio, no look-ahead")
    assert judged("scale", {key: {"throughput_tok_s": 1.221}})[text]
    assert not judged("scale", {key: {"throughput_tok_s": 1.219}})[text]


def test_claims_on_prompts_without_prefixes_follow_the_numbers() -> None:
    key = ("Azure conversation lengths, no prefixes", "95 %")
    throughput, tpot = (
        f"{', '.join(key)}: {what}, bfio / least_prefill" for what in ("throughput", "TPOT")
    )
    found = judged("serving_traffic", {(*key, "bfio"): {"throughput_tok_s": 0.99}})
    assert (found[throughput], found[tpot]) == (False, True)
    found = judged("serving_traffic", {(*key, "bfio"): {"tpot_mean_s": 1.01}})
    assert (found[throughput], found[tpot]) == (True, False)


def test_the_exponent_of_a_power_law_is_found() -> None:
    xs = (16, 64, 256)
    found = scaling.slope(xs, [[3 * x**0.5, 2 * x**0.7] for x in xs])
    assert found.mean == pytest.approx(0.6)


def test_power_is_averaged_over_time() -> None:
    mean_w = RECORDS.power_w(PowerModel(exponent=1.0)).mean(axis=1)
    times_s, watts = smoothed(RECORDS.seconds, mean_w, 4)
    assert times_s == pytest.approx([5, 15, 25, 35])
    assert watts == pytest.approx([(400 + 250) / 2] * 4)


def test_a_tiny_study_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases_module, "QUICK_SHARE", 100)
    runs = tmp_path / "runs"
    figures(out=tmp_path, runs=runs, only="deadlines", processes=1, quick=True)
    first = (tmp_path / "figures.json").read_text()
    figures(out=tmp_path, runs=runs, only="trajectories", processes=1, quick=True)
    both = json.loads((tmp_path / "figures.json").read_text())
    assert both["quick"] is True
    assert list(both["studies"]) == ["deadlines", "trajectories"]
    assert both["studies"]["deadlines"] == json.loads(first)["studies"]["deadlines"]
    assert (tmp_path / "trajectories.png").exists()
    assert (tmp_path / "power.png").exists()
    text = (tmp_path / "figures.md").read_text()
    assert text == markdown(outcomes_of(both), {"trajectories": "trajectories.png"}, quick=True)
    assert text.startswith("# Simulated figures (quick: no results)")
    assert "## Deadlines" in text


def test_only_full_figures_are_judged(tmp_path: Path) -> None:
    outcomes = {"deadlines": STUDIES["deadlines"].measure(MadeUp())}
    line = "| deadlines | BurstGPT lengths, bfio, no look-ahead, W=200"
    assert line in markdown(outcomes, {})
    assert line not in markdown(outcomes, {}, quick=True)
    assert document(outcomes)["studies"]["deadlines"]["claims"]
    assert "quick" not in document(outcomes)
    assert not document(outcomes, quick=True)["studies"]["deadlines"]["claims"]


@pytest.mark.parametrize("quick", [False, True])
def test_quick_and_full_figures_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    monkeypatch.setattr(Case, "run", None)
    outcomes = {"deadlines": STUDIES["deadlines"].measure(MadeUp())}
    text = json_text(document(outcomes, quick=quick))
    (tmp_path / "figures.json").write_text(text)
    assert read_document(tmp_path, quick=quick) == json.loads(text)
    with pytest.raises(InputError, match="quick.*full" if quick else "full.*quick"):
        figures(tmp_path, tmp_path, only="deadlines", processes=1, quick=not quick)


def test_figures_that_lack_a_case_are_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Case, "run", None)
    found = document({"deadlines": STUDIES["deadlines"].measure(MadeUp())})
    found["studies"]["gone"] = found["studies"]["deadlines"]
    (tmp_path / "figures.json").write_text(json_text(found))
    assert read_document(tmp_path) is not None
    del found["studies"]["deadlines"]["cases"][0]
    (tmp_path / "figures.json").write_text(json_text(found))
    with pytest.raises(InputError, match=r"figures\.json is not a file of figures .*KeyError"):
        figures(tmp_path, tmp_path, only="trajectories", processes=1)


def test_bad_input_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--only: unknown study 'tabel1'; did you mean table1"):
        figures(out=tmp_path, only="tabel1")
    (tmp_path / "figures.json").write_text('{"studies": 1}')
    with pytest.raises(InputError, match="is not a file of figures"):
        figures(out=tmp_path, runs=tmp_path, only="deadlines", processes=1, quick=True)


def test_shared_conditions_are_the_papers() -> None:
    (paper,) = options_of("burstgpt", "fcfs").configs()
    assert (paper.workers, paper.slots, paper.pool) == (16, 72, 128)
    assert (paper.steps, paper.warmup) == (4500, 500)
    assert (paper.step_time.base_s, paper.step_time.per_token_s) == (4.95e-3, 9.5e-8)


def _flags(command: str | None) -> set[tuple[str, ...]]:
    """Of a command, each with its value, in any order."""
    words = iter(shlex.split(command or "")[3:])
    return set(zip(words, words, strict=True))


class Kept:
    """A laboratory that has what was kept: rates of arrival follow from that, and so commands."""

    def __init__(self, outcomes: Outcomes) -> None:
        self.trials: list[Trial] = []
        self._outcomes = outcomes

    def run(self, trials: Sequence[Trial]) -> Outcomes:
        self.trials += trials
        return {trial.key: self._outcomes[trial.key] for trial in trials}


def test_the_kept_commands_are_those_of_the_cases() -> None:
    kept = outcomes_of(json.loads(Path("tests/data/figures/figures.json").read_text()))
    compared = 0
    for name, study in STUDIES.items():
        laboratory = Kept(kept[name])
        study.measure(laboratory)
        for case in laboratory.trials:
            if isinstance(case, Case):
                found = kept[name][case.key]
                assert _flags(found.command) == _flags(case.command), (name, case.key)
                compared += 1
    assert compared > 100
