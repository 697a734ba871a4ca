"""What a router learns of the cost of a step, by the state streams of emulated engines."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.core.step_time import StepTime
from tests.support.fleet import running_fleet, worker_flags
from tests.support.replays import run_replay
from tests.support.server import free_port, running_router

COST = StepTime(5e-3, 9.5e-8, 40e-6, 5e-5)
TERMS = ("step", "kv_token", "request", "prompt_token")
FLEET = ("--workers", "4", "--slots", "32", "--prefill-chunk", "544", "--time-scale", "2")
# Clients that each wait for their answer, from a few to more than there are slots.
SWEEP = ((8, 60), (24, 120), (64, 300), (144, 500))


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Samples of ``evenstep_step_cost_…`` by name and label, after the sweep."""
    folder, admin = tmp_path_factory.mktemp("learned"), free_port()
    with (
        running_fleet(folder, *FLEET, "--step-time", str(COST)) as fleet,
        running_router(folder, *worker_flags(fleet), "--admin-port", str(admin)) as router,
    ):
        for clients, requests in SWEEP:
            load = ("--arrivals", f"closed:{clients}", "--requests", str(requests))
            more = ("--trace", "azure-conv", "--max-tokens", "150", "--time-scale", "2")
            report = run_replay(router.url, folder / f"{clients}.json", *load, *more)
            assert report["completed"] == requests
        text = router.get("/metrics").text
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = sample.labels.get("term") or sample.labels.get("steps") or ""
            found.setdefault(sample.name, {})[label] = sample.value
    return found


@pytest.mark.slow
def test_each_number_is_within_5_percent_or_its_interval(
    metrics: dict[str, dict[str, float]],
) -> None:
    low, high = (
        metrics["evenstep_step_cost_low_seconds"],
        metrics["evenstep_step_cost_high_seconds"],
    )
    assert metrics["evenstep_barrier_steps_total"]
    for term, true in zip(TERMS, COST.numbers, strict=True):
        learned = metrics["evenstep_step_cost_seconds"][term]
        near = learned == pytest.approx(true, rel=0.05)
        assert near or low[term] <= true <= high[term], (term, learned, low[term], high[term])


@pytest.mark.slow
def test_the_four_numbers_explain_the_steps(metrics: dict[str, dict[str, float]]) -> None:
    assert metrics["evenstep_step_cost_explained_ratio"][""] > 0.99
    assert max(metrics["evenstep_step_cost_error_ratio"].values()) < 0.01
