"""Classes of requests with targets of their own, and the goodput of a simulation."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from loadgen.simulator.serving.serving_command import ServingOptions
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.traces.request_classes import RequestClass
from router.core.targets import Targets
from router.core.types import Dispatch
from tests.unit.loadgen.simulator.test_serving import config


@pytest.mark.parametrize(
    ("targets", "missed"),
    [
        # First tokens come 2.01 s and 3.53 s after the arrivals, the second ones 3.02 s and
        # 1.021 s later; nothing waits for a worker.
        (None, {}),
        (Targets(4.0, 4.0), {}),
        (Targets(3.0, None), {"prompt": 1}),
        (Targets(None, 2.0), {"tokens": 1}),
        (Targets(3.0, 2.0), {"prompt": 1, "tokens": 1}),
    ],
)
def test_goodput_by_hand(targets: Targets | None, missed: dict[str, int]) -> None:
    classes = (RequestClass("all", 1.0, targets),)
    rows = [(0.0, 10, 2, ()), (1.5, 20, 2, ())]
    result = simulate_serving(config(rows, classes=classes))
    met = 2 - sum(missed.values())
    assert result.goodput_per_s == pytest.approx(met / (2.01 + 3.02 + 1.021))
    assert result.met_by_class == {"all": met / 2}
    assert {cause: n for cause, n in result.misses.items() if n} == missed


def test_the_wait_for_a_slot_is_a_miss_of_its_own() -> None:
    # One slot: the second request waits for the first one's end.
    classes = (RequestClass("all", 1.0, Targets(3.5)),)
    rows = [(0.0, 10, 2, ()), (0.1, 10, 1, ())]
    result = simulate_serving(
        config(rows, classes=classes, workers=1, slots=1, dispatch=Dispatch.POOL, policy="fcfs")
    )
    assert result.misses == {"queue": 1, "prompt": 0, "tokens": 0}


def test_without_classes_all_that_complete_are_good() -> None:
    result = simulate_serving(config([(0.0, 10, 1, ())]))
    assert result.goodput_per_s == pytest.approx(1 / 2.01)
    assert (result.met_by_class, result.parameters["classes"]) == ({}, None)


def test_in_overload_from_the_first_request_on_targets_are_met() -> None:
    """All steps are full at first, so that none tells what prompts cost."""
    options = ServingOptions(
        policy="bfio",
        requests=200,
        arrivals="poisson:3.2",
        workers=2,
        classes="chat:.6:1:.04,agents:.2:3:.06,batch:.2",
    )
    bounded = simulate_serving(replace(options, prompt_budget="2048").config())
    free = simulate_serving(options.config())
    assert free.goodput_per_s > 2 * bounded.goodput_per_s
    assert free.met_by_class["agents"] > 0.5
    assert free.met_by_class["chat"] > 0.25, "a third have prompts of more than a second"


def test_the_command(evenstep: Callable[..., tuple[int, str, str]]) -> None:
    flags = "--requests 40 --classes chat:.5:1,batch:.5 --json -"
    code, out, err = evenstep("simulate", "serving", *flags.split())
    assert code == 0, err
    written = json.loads(out)
    assert written["met_by_class"]["batch"] == 1.0
    assert written["parameters"]["classes"] == "chat:0.5:1,batch:0.5"
    assert "targets met: batch 100.0%, chat" in " ".join(err.split())
