"""The simulator's drift, as in Theorem 3: growth of the load, while a step yields one token."""

from dataclasses import asdict

import pytest

from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_command import ARRIVALS
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_engines import Engines
from loadgen.simulator.decode.decode_results import DecodeResult
from loadgen.simulator.decode.length_sources import LawLengths
from loadgen.simulator.decode.oracle import Drift, Knowledge
from loadgen.simulator.decode.request_streams import Job
from loadgen.traces.arrivals import Arrivals
from router.core.forecast.end_signals import CapSignal
from router.core.forecast.forecast import Ends, WorkProfile

DRIFTS = [0.0, 0.5, 1.0, 2.0]


def simulated(drift: float, lengths: str, lookahead: str, arrivals: str = "full") -> DecodeResult:
    config = DecodeConfig(
        policy="bfio",
        lengths=LawLengths.parse(lengths),
        workers=4,
        slots=8,
        pool=16,
        steps=400,
        warmup=50,
        horizon=8,
        arrivals=Arrivals.parse(arrivals, ARRIVALS),
        knowledge=Knowledge.parse(lookahead),
        profile=WorkProfile(growth=drift),
        deadline_steps=0,
        overcommit=0,
    )
    return simulate(config, keep_records=True)


@pytest.mark.parametrize(("drift", "held"), [(0.0, 10), (0.5, 40), (1.0, 70), (2.0, 130)])
def test_it_changes_what_requests_hold_but_not_how_far_they_are(drift: float, held: int) -> None:
    profile = WorkProfile(growth=drift)
    engines = Engines(1, 1, profile)
    engines.send(Job(0, 10, 100, 0.0), 0, 0)
    engines.begin(0, 0.0)
    engines.send(Job(1, 7, 100, 0.0), 0, 60)
    seen = engines.foreseen(60, 100)

    assert seen.tokens.tolist() == [held, 7]
    assert seen.generated_tokens.tolist() == [60, 0]
    assert seen.take(slice(1)).tokens.tolist() == [held]
    ends = CapSignal(Drift(**asdict(profile))).predict(seen, 200)
    assert isinstance(ends, Ends)
    assert ends.steps.tolist() == seen.remaining.tolist() == [40, 100]


@pytest.mark.parametrize("drift", DRIFTS)
def test_caps_that_all_reach_tell_as_much_as_an_oracle(drift: float) -> None:
    cap, oracle = (
        simulated(drift, "constant:100,40", lookahead, "poisson:150").records
        for lookahead in ("cap", "oracle")
    )
    assert cap is not None
    assert oracle is not None
    assert cap.loads.tolist() == oracle.loads.tolist()


def test_a_worker_gains_more_until_its_next_request_ends() -> None:
    plain = simulated(1.0, "geometric:100,40", "oracle").parameters["lead_tokens"]
    assert isinstance(plain, float)
    for drift in DRIFTS:
        lead_tokens = simulated(drift, "geometric:100,40", "oracle").parameters["lead_tokens"]
        assert lead_tokens == pytest.approx(drift * plain, rel=0.2)
