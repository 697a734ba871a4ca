"""What the status page says that a group's figures rest on."""

import msgspec
import pytest
from msgspec.structs import replace

from router.admin.facts import Footing, facts
from router.core.events import GaugesReceived, WorkerDown
from router.core.forecast.forecast import WorkProfile
from router.core.forecast.look_ahead import SIGNALS, LookAhead
from router.core.policies.baselines import PerRequest, jsq
from router.core.policies.bfio.policy import BfIo
from router.core.policies.policy_protocol import Policy
from router.core.prefix.ids import chain, seed
from router.core.queue.pool import Pool
from router.core.rounds.decider import Decider
from router.core.state.cluster import Cluster
from router.core.state.foreign_load import Gauges
from router.core.step_fit import FittedStepTime
from router.core.step_time import StepBudget, StepTime
from router.core.types import (
    Content,
    Dispatch,
    Request,
    RunningRequest,
    WorkerSpec,
    prefill_stage,
)
from tests.support.clusters import begin, cluster_of, send, show
from tests.support.core import part, running, snapshot, token

TWO = (WorkerSpec("a", "http://a"), WorkerSpec("b", "http://b"))
PREFILL = WorkerSpec("p", "http://p", role="prefill")


def decider(
    cluster: Cluster, policy: Policy | None = None, look_ahead: LookAhead | None = None
) -> Decider:
    least = PerRequest(jsq)
    group = cluster.groups["default"]
    return Decider(group, Pool(8), policy or least, least, Dispatch.POOL, look_ahead)


def told(
    cluster: Cluster, deciding: Decider | None = None, powered: int = 0, **footing: object
) -> dict[str, tuple[str, str]]:
    """Standing and text by topic."""
    found = facts(
        cluster.groups["default"],
        cluster.prefill_group("default"),
        deciding,
        powered,
        Footing(**footing),  # type: ignore[arg-type]
    )
    return {fact.topic: (fact.standing, fact.text) for fact in found}


def test_workers() -> None:
    cluster = cluster_of(*TWO)
    assert told(cluster)["Workers"] == ("good", "2 workers up, none down.")
    cluster.apply(WorkerDown("a", "gone"))
    assert told(cluster)["Workers"] == ("problem", "1 worker down, 1 up.")
    deciding = decider(cluster)
    assert told(cluster, deciding)["Workers"][1] == "1 worker down; 1 left for all requests."
    cluster.apply(WorkerDown("b", "gone"))
    assert told(cluster)["Workers"] == ("problem", "No worker is up.")
    assert told(cluster, deciding)["Workers"][1] == "No worker is up: requests are turned away."
    assert "Loads" not in told(cluster)


def test_loads_by_the_source_of_each() -> None:
    cluster = cluster_of(*TWO, WorkerSpec("c", "http://c"))
    show(cluster, snapshot("full", 1), worker_id="a")
    cluster.apply(GaugesReceived("b", Gauges(1), 1.0))
    standing, text = told(cluster)["Loads"]
    assert standing == "fallback"
    assert "1 worker known by snapshots" in text
    assert "1 worker known by the engine's own metrics" in text
    assert "1 worker known only by what this router has sent" in text

    for worker_id in "bc":
        show(cluster, snapshot("full", 1), worker_id=worker_id)
    assert told(cluster)["Loads"][0] == "good"


def test_idle_share_is_not_known_without_steps_or_their_fitted_time() -> None:
    cluster = cluster_of(*TWO)
    assert told(cluster)["Idle share"] == (
        "unknown",
        "No engine tells its steps, so imbalance is of the loads as the router counts them.",
    )
    show(cluster, snapshot("full", 1, step_s=0.0), worker_id="a")
    assert told(cluster)["Idle share"][1] == "Not known yet: nothing has run since the start."
    step(cluster, 2, None, 0)
    step(cluster, 3, None, 0)
    assert told(cluster)["Idle share"][1].startswith("Not known yet: workers must step together")


def step(cluster: Cluster, number: int, waited_s: float | None, load_tokens: int) -> None:
    """Both workers make one, of which engines may time how long they waited."""
    for worker_id, extra in (("a", 0), ("b", load_tokens)):
        told_now = snapshot("full", number, running("0-x", 100 + extra), step_s=0.01 + extra * 1e-6)
        timed = msgspec.structs.replace(told_now, waited_s=waited_s)
        show(cluster, timed, worker_id=worker_id)


def test_what_engines_tell_of_their_prefix_caches() -> None:
    cluster = cluster_of(*TWO)
    assert told(cluster)["Prefix caches"][0] == "unknown"
    pieces = chain(range(160), seed())
    guessed = Request(token(0), "default", 160, content=Content(pieces=pieces))
    begin(cluster, guessed, "b")
    assert told(cluster)["Prefix caches"] == (
        "fallback",
        "Guessed of 1 worker by what was sent there. The vLLM plug-in tells what is cached.",
    )
    begun = msgspec.structs.replace(snapshot("full", 1), cache_block=16, blocks_stored=pieces[:64])
    show(cluster, begun)
    assert told(cluster)["Prefix caches"] == ("fallback", "Told by 1 worker, not by 1.")
    show(cluster, begun, worker_id="b")
    assert told(cluster)["Prefix caches"] == ("good", "Told by 2 workers.")
    for number in (1, 2):
        content = Content(pieces=pieces)
        send(cluster, Request(token(number), "default", 160, content=content))
    shown = [RunningRequest(part(number), 160, 1, 64 * number) for number in (1, 2)]
    show(cluster, msgspec.structs.replace(snapshot("delta", 2, *shown), cache_block=16))
    assert told(cluster)["Prefix caches"] == (
        "good",
        "Told by 2 workers. Engines had 60% of the prompt tokens sent to them cached; foretold "
        "exactly in 50% of 2 requests.",
    )


def test_the_cost_of_a_step_is_learned_unless_it_is_fixed() -> None:
    cluster = cluster_of(*TWO)
    assert told(cluster)["Cost of a step"] == (
        "unknown",
        "No engine tells its steps. The vLLM plug-in does.",
    )
    step(cluster, 0, None, 1000)
    yet = "Not known yet: steps of different loads tell it."
    assert told(cluster)["Cost of a step"] == ("unknown", yet)
    for number in range(1, 200):
        step(cluster, number, None, number % 7 * 1000)
    standing, text = told(cluster)["Cost of a step"]
    assert standing == "good"
    assert "1000 ns per KV token of the slowest worker, which explains 100% of how" in text
    assert text.endswith("With 95 % certainty from 1000 ns per KV token to 1000 ns per KV token.")
    cluster.fix_step_time(StepTime(5e-3, 0.0, 4e-5))
    said = "5 ms + 40 us per request of the slowest worker, as --step-time says."
    assert told(cluster)["Cost of a step"] == ("fallback", said)


def test_the_prompt_budget_and_who_keeps_it() -> None:
    cluster = cluster_of(*TWO)
    assert "Prompt budget" not in told(cluster)
    cluster.groups["default"].prompt_budget = StepBudget(2048, 8)
    none = "No worker takes prompt budgets: set prompt_budget in the plug-in's settings."
    assert told(cluster)["Prompt budget"] == ("fallback", none)
    for worker_id, kept in (("a", 2048), ("b", None)):
        show(cluster, replace(snapshot("full", 1), prompt_budget=kept), worker_id=worker_id)
    said = "At most 2,048 prompt tokens in a step of every 8 steps, none in the others."
    lost = "But 1 worker had no bound in the last step: the plug-in's prompt_budget bounds it."
    assert told(cluster)["Prompt budget"] == ("fallback", f"{said} {lost}")
    show(cluster, replace(snapshot("full", 2), prompt_budget=2048), worker_id="b")
    assert told(cluster)["Prompt budget"] == ("good", said)


def test_no_interval_is_told_where_no_number_is_known() -> None:
    cluster = cluster_of(*TWO)
    (group,) = cluster.groups.values()
    group._ledger.step_fit.fitted = FittedStepTime(5e-3, 1e-7, explained=0.6)
    text = told(cluster)["Cost of a step"][1]
    assert text.endswith("of the slowest worker, which explains 60% of how steps vary.")


def test_idle_share_is_modelled_where_engines_do_not_time_it() -> None:
    cluster = cluster_of(*TWO)
    for number in range(1, 200):
        step(cluster, number, None, number % 7 * 1000)
    standing, text = told(cluster)["Idle share"]
    assert (standing, text.partition(":")[0]) == ("fallback", "Modelled")
    for number in range(200, 300):
        step(cluster, number, 0.001, number % 7 * 1000)
    standing, text = told(cluster)["Idle share"]
    assert standing == "fallback"
    assert "% timed by the engines, the rest modelled" in text


def test_where_workers_do_not_step_together_none_waits() -> None:
    cluster = cluster_of(*TWO)
    group = cluster.groups["default"]
    assert group.barrier is None
    group.set_lockstep(True)
    assert group.barrier is True
    for number in range(1, 40):
        for worker_id, first in (("a", 0), ("b", 1000)):
            message = snapshot("full", number, running("0-x", 100 + number), step_s=0.01)
            show(
                cluster, msgspec.structs.replace(message, step=first + number), worker_id=worker_id
            )
    assert group.barrier is False
    standing, text = told(cluster)["Idle share"]
    assert (standing, text.partition(":")[0]) == ("good", "None")
    # One by itself teaches no waiting either.
    assert group.every_step.timed_s == 0


def test_idle_share_that_all_engines_time() -> None:
    cluster = cluster_of(*TWO)
    for number in range(1, 9):
        step(cluster, number, 0.001, 0)

    assert told(cluster)["Idle share"][0] == "good"


@pytest.mark.parametrize(
    ("powered", "calibrated", "standing", "text"),
    [
        (0, True, "unknown", "No worker tells"),
        (1, True, "fallback", "the others are not in the sum"),
        (2, False, "fallback", "Without --power-levels"),
        (2, True, "good", "Told by 2 workers."),
    ],
)
def test_power(powered: int, calibrated: bool, standing: str, text: str) -> None:
    said = told(cluster_of(*TWO), powered=powered, calibrated=calibrated)["Power"]

    assert said[0] == standing
    assert text in said[1]


def test_a_policy_that_fails() -> None:
    cluster = cluster_of(*TWO)
    deciding = decider(cluster)
    assert told(cluster, deciding)["Policy"] == ("unknown", "It has had nothing to decide yet.")
    deciding.stats.rounds = 1000
    assert told(cluster, deciding)["Policy"] == ("good", "Decided all 1,000 rounds itself.")
    deciding.stats.policy_errors = 1
    assert told(cluster, deciding)["Policy"][0] == "problem"


def test_prompt_sizes() -> None:
    cluster = cluster_of(*TWO)
    deciding = decider(cluster)
    assert told(cluster, deciding)["Prompt sizes"][0] == "unknown"
    deciding.stats.assigned = 4
    assert told(cluster, deciding)["Prompt sizes"][0] == "good"
    deciding.stats.estimated = 1
    assert told(cluster, deciding)["Prompt sizes"][1].startswith("1 of 4 estimated")


@pytest.mark.parametrize(("compiled", "standing"), [(True, "good"), (False, "fallback")])
def test_the_solver_of_bfio_alone(compiled: bool, standing: str) -> None:
    cluster = cluster_of(*TWO)

    assert told(cluster, decider(cluster, BfIo(0.1)), compiled=compiled)["Solver"][0] == standing
    assert "Solver" not in told(cluster, decider(cluster))


@pytest.mark.parametrize(
    ("lookahead", "horizon", "standing", "text"),
    [
        ("none", None, "good", "Off, as asked"),
        ("survival", 5, "good", "5 steps ahead, by the lengths learned"),
        ("auto", None, "fallback", "which have told nothing yet"),
    ],
)
def test_look_ahead(lookahead: str, horizon: int | None, standing: str, text: str) -> None:
    cluster = cluster_of(*TWO)
    ahead = LookAhead(SIGNALS[lookahead](WorkProfile()), horizon=horizon)
    said = told(cluster, decider(cluster, BfIo(0.1), ahead), lookahead=lookahead)["Look-ahead"]

    assert said[0] == standing
    assert text in said[1]


def test_prompts_of_prefill_workers() -> None:
    cluster = cluster_of(*TWO, PREFILL)
    deciding = decider(cluster)
    assert told(cluster, deciding)["Prompts"] == (
        "good",
        "Computed by 1 worker of default/prefill.",
    )
    deciding.stats.fallbacks = 2
    assert told(cluster, deciding)["Prompts"][0] == "fallback"
    cluster.apply(WorkerDown("p", "gone"))
    assert told(cluster, deciding)["Prompts"][0] == "problem"
    prefills = cluster.groups[prefill_stage("default")]
    assert "Idle share" not in {fact.topic for fact in facts(prefills, None, None, 0, Footing())}
