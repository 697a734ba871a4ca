"""The verdict on either side of every threshold, and the words that go with it."""

from dataclasses import replace
from typing import Any

import pytest

from loadgen.diagnose.analysis.before_after import compare
from loadgen.diagnose.analysis.findings import (
    Barrier,
    Caches,
    Figures,
    Findings,
    Load,
    Memory,
    Waiting,
)
from loadgen.diagnose.analysis.prospects import Prospect, Prospects
from loadgen.diagnose.analysis.verdict import Word, final_verdict, first_verdict, unsteady
from loadgen.diagnose.energy_per_day import Energy
from loadgen.diagnose.words import HEADLINES, energy_words
from router.core.errors import InputError
from router.core.step_fit import FittedStepTime
from router.core.types import Dispatch

# Two workers of 16 slots that wait for each other 20 % of the time.
BUSY = Findings(
    steps=3000,
    elapsed_s=60.0,
    barrier=Barrier(1.0, 0.95, FittedStepTime(2e-3, 1e-6), 1.01e-6, 0.5),
    waiting=Waiting(0.2, "modelled", 0.2, 0.0, 4000, 6000, 8000, 0.01, 3000),
    load=Load(2, 16, 0.97, 10, 1.0, 41, 20, 1.0, 1000, 3, 400, 80),
    memory=Memory(100_000, 0.06, 0.1, 0, 0, 0.01),
    caches=Caches(None, told=False, block_tokens=None, ttft_s=None),
)


def changed(part: str, **values: Any) -> Findings:
    return replace(BUSY, **{part: replace(getattr(BUSY, part), **values)})


def word(found: Findings) -> Word | None:
    verdict = first_verdict(found)
    return None if verdict is None else verdict.word


def test_a_busy_uneven_cluster_is_simulated() -> None:
    assert first_verdict(BUSY) is None


@pytest.mark.parametrize(
    ("part", "over", "under", "expected"),
    [
        ("load", {"workers": 1}, {"workers": 2}, Word.ONE_WORKER),
        ("barrier", {"together_share": 0.89}, {"together_share": 0.9}, Word.NO_BARRIER),
        ("barrier", {"together_share": None}, {}, Word.TOO_LITTLE_LOAD),
        ("memory", {"per_request": 0.02}, {"per_request": 0.019}, Word.KV_STARVED),
        ("memory", {"held_share": 0.05}, {"held_share": 0.049}, Word.KV_STARVED),
        ("memory", {"per_request": 1.0, "held_share": None}, {"held_share": None}, Word.KV_STARVED),
        ("waiting", {"idle_share": 0.019}, {"idle_share": 0.02}, Word.ALREADY_EVEN),
        ("load", {"completed": 49}, {"completed": 50}, Word.TOO_SHORT),
        ("load", {"slots": None, "slots_used": None}, {}, Word.TOO_SHORT),
        ("barrier", {"fitted": None}, {}, Word.TOO_SHORT),
    ],
)
def test_thresholds(part: str, over: dict[str, Any], under: dict[str, Any], expected: Word) -> None:
    assert word(changed(part, **over)) is expected
    assert word(changed(part, **under)) is None


def test_even_loads_are_simulated_where_prefixes_are_known() -> None:
    even = changed("waiting", idle_share=0.0)
    assert word(even) is Word.ALREADY_EVEN
    known = Caches(0.3, told=True, block_tokens=64, ttft_s=None)
    assert first_verdict(replace(even, caches=known)) is None


def test_free_slots_are_no_want_of_load_while_requests_wait() -> None:
    free = {"slots_used": 0.49, "waiting_share": 0.04}

    assert word(changed("load", **free)) is Word.TOO_LITTLE_LOAD
    assert word(changed("load", **free | {"slots_used": 0.5})) is None
    assert word(changed("load", **free | {"waiting_share": 0.05})) is None


def test_workers_that_wait_for_prompts_have_load() -> None:
    idle = changed("load", slots_used=0.1, waiting_share=0.0)

    assert word(replace(idle, waiting=replace(BUSY.waiting, prompt_share=None))) is (
        Word.TOO_LITTLE_LOAD
    )
    assert word(replace(idle, waiting=replace(BUSY.waiting, prompt_share=0.019))) is (
        Word.TOO_LITTLE_LOAD
    )
    assert word(replace(idle, waiting=replace(BUSY.waiting, prompt_share=0.02))) is None


def test_figures_are_scaled_by_what_was_simulated() -> None:
    measured = Figures(4000, 0.5, 3000, 0.01)
    found = measured.scaled(Figures(300, 0.5, 900, 0.02), Figures(200, 0.25, 600, 0.04))

    assert (found.imbalance_tokens, found.throughput_tok_s) == (6000, 4500)
    assert found.step_s == pytest.approx(0.005)
    # A second of waiting for one of work, times three.
    assert found.idle_share == pytest.approx(0.75)
    assert measured.scaled(measured, measured) == measured


def test_what_is_nothing_in_the_simulation_in_force_is_taken_as_simulated() -> None:
    found = Figures(4000, 0.5, 3000, 0.01).scaled(Figures(9, 0.3, 900, 0.02), Figures(0, 0, 1, 1))

    assert found.imbalance_tokens == 9
    assert found.idle_share == pytest.approx(0.3)


def test_few_steps_are_little_load_or_too_short_a_time() -> None:
    few = replace(BUSY, steps=199)
    seldom = replace(BUSY.barrier, stepping_share=0.49)

    assert word(few) is Word.TOO_SHORT
    assert word(replace(few, barrier=seldom)) is Word.TOO_LITTLE_LOAD
    assert word(replace(few, barrier=seldom, elapsed_s=19.9)) is Word.TOO_SHORT
    assert word(replace(BUSY, steps=200)) is None


def test_no_steps_at_all() -> None:
    silent = replace(BUSY, steps=0)
    nothing = replace(silent, load=replace(BUSY.load, completed=0, failed=0))

    assert word(silent) is Word.TOO_SHORT
    assert "no worker sends snapshots" in first_verdict(silent).reasons[0]  # type: ignore[union-attr]
    assert word(replace(silent, load=replace(BUSY.load, completed=0, failed=1))) is Word.TOO_SHORT
    assert word(nothing) is Word.TOO_LITTLE_LOAD
    assert word(replace(nothing, elapsed_s=19.9)) is Word.TOO_SHORT


def test_little_waiting_is_even_loads_or_cheap_tokens() -> None:
    little = changed("waiting", idle_share=0.01)
    cheap = replace(little, barrier=replace(BUSY.barrier, attention_share=0.09))
    even = replace(cheap, waiting=replace(little.waiting, mean_load_tokens=7900))

    assert word(little) is Word.ALREADY_EVEN
    assert word(cheap) is Word.CHEAP_ATTENTION
    assert word(even) is Word.ALREADY_EVEN


def test_without_a_fit_the_most_that_a_token_costs_may_tell() -> None:
    waiting = replace(BUSY.waiting, idle_share=None, idle_share_is=None)

    def unfitted(most_s: float | None, mean_load: float = 6000) -> Findings:
        barrier = Barrier(1.0, 0.95, None, most_s, None)
        return replace(BUSY, barrier=barrier, waiting=replace(waiting, mean_load_tokens=mean_load))

    # 4000 tokens of imbalance at two workers, of steps of 10 ms.
    assert word(unfitted(0.9e-7)) is Word.CHEAP_ATTENTION
    assert word(unfitted(1.1e-7)) is Word.TOO_SHORT
    assert word(unfitted(None)) is Word.TOO_SHORT
    assert word(unfitted(None, mean_load=7900)) is Word.ALREADY_EVEN


def prospects(gain: float, *, current: bool = False, best: str = "bfio") -> Prospects:
    now = BUSY.waiting.figures
    assert now is not None
    new = replace(now, throughput_tok_s=now.throughput_tok_s * (1 + gain), idle_share=0.05)
    row = Prospect(best, Dispatch.POOL, current, new, new, 0.1)
    return Prospects("full", 1000, 1500, (row,))


def test_a_switch_must_win_something() -> None:
    assert final_verdict(BUSY, prospects(0.0201)).word is Word.BALANCING_PAYS
    assert final_verdict(BUSY, prospects(0.0199)).word is Word.ALREADY_EVEN
    assert final_verdict(BUSY, prospects(0.25, current=True)).word is Word.ALREADY_EVEN


@pytest.mark.parametrize(
    ("error", "expected"), [(0.29, Word.ALREADY_EVEN), (-0.31, Word.TOO_SHORT)]
)
def test_a_simulator_that_is_far_off_foretells_nothing(error: float, expected: Word) -> None:
    verdict = final_verdict(BUSY, prospects(error, current=True))

    assert verdict.word is expected
    assert ("-31% off in the tokens/s" in verdict.reasons[0]) == (expected is Word.TOO_SHORT)


def test_bfio_is_advised_unless_another_is_surely_better() -> None:
    first, own = prospects(0.1, best="balance_route").all[0], prospects(0.096).all[0]

    assert Prospects("full", 1, 1, (first, own)).best is own
    assert Prospects("full", 1, 1, (first, prospects(0.09).all[0])).best is first
    assert Prospects("full", 1, 1, (first,)).best is first


def test_every_word_has_a_headline() -> None:
    assert set(HEADLINES) == set(Word)


@pytest.mark.parametrize(
    ("second_half", "expected"),
    [(0.79, True), (0.8, False), (1.25, False), (1.26, True), (None, False)],
)
def test_a_load_that_grows_or_falls_is_not_steady(
    second_half: float | None, expected: bool
) -> None:
    assert unsteady(replace(BUSY.load, second_half=second_half)) is expected


ENERGY = Energy("measured", 1000.0, 3.6e8, None, None, None, None)


def test_what_is_unknown_of_joules_and_money_is_said() -> None:
    said = energy_words(ENERGY)

    assert said.startswith("1,000 W (measured), 100.0 kWh a day")
    assert "What waiting takes of it is unknown" in said
    assert "Money is unknown without --price." in said
    assert "The same tokens" not in said


def test_joules_have_a_price() -> None:
    saved = replace(ENERGY, saved_share=-0.05, saved_per_day_j=-1.8e7)
    said = energy_words(replace(saved, waiting_per_day_j=3.6e7, price_per_kwh=0.3))

    assert "100.0 kWh (cost 30.00) a day" in said
    assert "Waiting takes 10.0 kWh (cost 3.00) of it." in said
    assert "The same tokens would take 5.0 kWh (cost 1.50) more (modelled)." in said


def test_watts_that_nobody_knows_are_not_made_up() -> None:
    said = energy_words(Energy("unknown", None, None, None, 0.031, None, 0.3))

    assert said.startswith("Unknown: too few workers tell their power")
    assert " W " not in said
    assert "kWh" not in said
    assert "The same tokens would take 3.1% less (modelled)." in said


FIGURES = Figures(4000, 0.2, 3000, 0.01)
EARLIER: dict[str, Any] = {
    "conditions": {"policy": "round_robin"},
    "waiting": {"imbalance_tokens": 8000, "idle_share": 0.3, "throughput_tok_s": 2500, "step_s": 1},
    "load": {"workers": 2, "prompt_tokens": 400, "output_tokens": None, "inside": 41},
    "advice": {"policy": "bfio", "dispatch": "pool"},
    "policies": [
        {
            "policy": "bfio",
            "dispatch": "pool",
            "predicted": {
                "imbalance_tokens": 4000,
                "idle_share": 0.19,
                "throughput_tok_s": 3100,
                "step_s": 1,
            },
        }
    ],
}


@pytest.mark.parametrize("in_force", [None, ("bfio", "pool")])
def test_a_prediction_is_compared_with_what_is_measured(in_force: tuple[str, str] | None) -> None:
    compared = compare(EARLIER, BUSY, in_force, "x.json")
    idle, imbalance = compared.changes["idle_share"], compared.changes["imbalance_tokens"]

    assert (compared.before, compared.policy) == ("round_robin", "bfio, pool")
    assert idle.predicted_gain == pytest.approx(-0.11)
    assert idle.measured_gain == pytest.approx(-0.1)
    assert idle.gain_error == pytest.approx(0.1)
    assert imbalance.gain_error == 0
    assert compared.load == ()


def test_what_has_not_changed_has_no_error() -> None:
    same = EARLIER | {"waiting": EARLIER["waiting"] | {"imbalance_tokens": 4000}}

    assert compare(same, BUSY, None, "x").changes["imbalance_tokens"].gain_error is None


def test_another_load_is_said() -> None:
    longer = EARLIER | {"load": EARLIER["load"] | {"prompt_tokens": 800}}

    assert compare(longer, BUSY, None, "x").load == ("mean prompt, tokens: 800 then, 400 now",)


@pytest.mark.parametrize(
    ("earlier", "in_force", "message"),
    [
        ({}, None, "x.json predicts nothing"),
        (EARLIER | {"advice": None}, None, "x.json predicts nothing"),
        (EARLIER | {"policies": 3}, None, "x.json predicts nothing"),
        ({"verdict": "already_even", "policies": []}, None, "its verdict is already_even"),
        (EARLIER, ("jsq", "pool"), "predicted nothing of jsq, pool; it did of bfio, pool"),
    ],
)
def test_no_prediction_to_compare_with(
    earlier: dict[str, Any], in_force: tuple[str, str] | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        compare(earlier, BUSY, in_force, "x.json")


def test_nothing_measured_to_compare_with() -> None:
    with pytest.raises(InputError, match="nothing to compare with"):
        compare(EARLIER, changed("waiting", idle_share=None), None, "x.json")
