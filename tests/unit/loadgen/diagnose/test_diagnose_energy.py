"""What a switch saves, and what that costs."""

import pytest
from msgspec.structs import replace

from loadgen.diagnose.analysis.window import Span, window_of
from loadgen.diagnose.diagnosis import Diagnosis, diagnose_window, report
from loadgen.model.power_model import PowerModel
from router.recording.lines import Recording
from tests.support.recorded import Cluster, recording


def diagnosed(whole: Recording, price: float | None = None) -> Diagnosis:
    return diagnose_window(window_of(whole, Span()), price, ["bfio", "balance_route"])


def test_what_a_switch_saves_goes_by_the_energy_of_a_token() -> None:
    found = diagnosed(recording(Cluster()))
    assert found.energy is not None
    assert found.energy.saved_share is not None
    assert found.prospects is not None
    assert found.prospects.current is not None
    best_j = found.prospects.best.energy_j_per_token
    now_j = found.prospects.current.energy_j_per_token
    assert found.energy.saved_share == pytest.approx(1 - best_j / now_j)
    assert 0 < found.energy.saved_share < 1


def test_of_an_unknown_balancer_the_recorded_loads_say_the_energy_of_a_token() -> None:
    found = diagnosed(recording(Cluster(), source="observe", policy=None))
    assert found.energy is not None
    assert found.prospects is not None
    seen = found.window
    watts = PowerModel().watts(seen.loads / seen.loads.max(axis=1, keepdims=True)).sum(axis=1)
    now_j = float((watts * seen.step_s).sum()) / seen.running.sum()
    best_j = found.prospects.best.energy_j_per_token
    assert found.energy.saved_share == pytest.approx(1 - best_j / now_j)


def test_money_is_joules_times_their_price() -> None:
    whole = recording(Cluster())
    steps = tuple(replace(step, power_w=[150.0] * 4) for step in whole.steps)
    powered = Recording(whole.header, steps, whole.requests)
    used = report(diagnosed(powered, 0.3))["energy"]
    assert used["power_is"] == "measured"
    for name in ("per_day", "saved_per_day"):
        assert used[f"{name}_cost"] == pytest.approx(used[f"{name}_j"] / 3.6e6 * 0.3)
    assert used["saved_per_day_j"] == pytest.approx(used["saved_share"] * used["per_day_j"])
