"""What decides for a group: what its look-ahead learns, and what is said of a decision."""

import random
from collections.abc import Sequence

import pytest

from router.core.errors import PolicyError
from router.core.events import (
    Arrived,
    Began,
    Dispatched,
    Ended,
    GaugesReceived,
    Progressed,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
from router.core.forecast.end_signals import CapSignal, SurvivalSignal
from router.core.forecast.forecast import WorkProfile
from router.core.forecast.learned_profile import PROMPT_RATIO
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.baselines import PerRequest, fcfs
from router.core.policies.bfio.policy import BfIo
from router.core.policies.prompts import barrier_time
from router.core.prefix.ids import chain, seed
from router.core.queue.pool import Pool
from router.core.rounds.decider import Decider
from router.core.state.cluster import Cluster
from router.core.state.foreign_load import Gauges
from router.core.step_time import StepBudget, StepTime
from router.core.types import (
    Assignment,
    Content,
    Dispatch,
    Outcome,
    Request,
    WorkerSpec,
)
from tests.support.core import running, snapshot, token

SLOTS = 4


class Life:
    """A group of three workers whose requests come and go; none has snapshots at first."""

    def __init__(self, look_ahead: LookAhead | None = None) -> None:
        self.cluster = Cluster(WorkerSpec(i, i, slots=SLOTS) for i in "abc")
        for worker_id in "abc":
            self.cluster.apply(WorkerUp(worker_id))
        self.policy = BfIo(0.1)
        self.decider = Decider(
            self.cluster.groups["default"],
            Pool(100),
            self.policy,
            PerRequest(fcfs),
            Dispatch.POOL,
            look_ahead,
        )
        self.serial = 0

    def arrive(self, prompt_tokens: int = 100, content: Content | None = None) -> str:
        self.serial += 1
        sent = Request(
            token(self.serial),
            "default",
            prompt_tokens,
            max_tokens=4000,
            arrival_s=self.serial,
            content=content,
        )
        self.cluster.apply(Arrived(sent))
        self.decider.pool.add(sent)
        return sent.id

    def decide(self) -> Sequence[Assignment]:
        done = self.decider.decide(0.0, lambda: 0.0)
        for assignment in done:
            self.decider.pool.remove(assignment.request_id)
            self.cluster.apply(Dispatched(*assignment))
        return done

    def end(self, request_id: str) -> None:
        complete = self.cluster.apply(Ended(request_id, Outcome.COMPLETED))
        self.decider.learn(step_complete=complete)

    def live(self, steps: int, output: int, told_every: int) -> int:
        """Full workers whose requests all take so many steps, of which their streams tell."""
        age: dict[str, int] = {}
        for _ in range(steps):
            while len(age) < 3 * SLOTS:
                request_id = self.arrive()
                age[request_id] = self.serial % output if self.serial <= 3 * SLOTS else 0
                self.decide()
            for request_id in list(age):
                age[request_id] += 1
                if age[request_id] % told_every == 0:
                    self.cluster.apply(Progressed(request_id, age[request_id]))
                if age[request_id] >= output:
                    del age[request_id]
                    self.end(request_id)
        return steps


class Counting(LookAhead):
    """Counts the steps that it is told."""

    steps = 0

    def advance(self, steps: int = 1) -> bool:
        self.steps += steps
        return super().advance(steps)


def test_without_snapshots_the_tokens_that_requests_receive_are_steps() -> None:
    look_ahead = Counting(CapSignal())
    steps = Life(look_ahead).live(2000, output=40, told_every=4)
    assert look_ahead.steps == pytest.approx(steps, rel=0.2)


def test_without_snapshots_the_look_ahead_learns() -> None:
    signal = SurvivalSignal()
    look_ahead = LookAhead(signal)
    Life(look_ahead).live(3000, output=20, told_every=4)
    assert look_ahead._lengths.mean_tokens == pytest.approx(20, rel=0.5)
    assert look_ahead.parameters.lead_tokens < 100, "reviewed: at first it is 384"
    assert look_ahead.skill is not None
    assert signal.survival(100)[30] < 0.5, "drawn anew: at first a mean of 256 is assumed"


def test_accepted_drafts_make_fewer_steps() -> None:
    look_ahead = Counting(CapSignal(), WorkProfile(growth=2))
    life = Life(look_ahead)
    sent = life.arrive()
    life.decide()
    for tokens in (3, 5, 8):
        life.cluster.apply(Progressed(sent, tokens))
        life.decider.learn(step_complete=False)
    assert look_ahead.steps == 4


def test_where_a_worker_has_snapshots_they_alone_tell_the_steps() -> None:
    look_ahead = Counting(CapSignal())
    life = Life(look_ahead)
    sent = life.arrive()
    ((_, worker_id),) = life.decide()
    life.cluster.apply(Progressed(sent, 9))
    other = "c" if worker_id != "c" else "b"
    message = SnapshotReceived(other, snapshot("full", 1, running("x", 50)), 0.0)
    life.decider.learn(step_complete=life.cluster.apply(message))
    assert look_ahead.steps == 1
    life.end(sent)
    assert look_ahead.steps == 1
    life.cluster.apply(WorkerDown(other, "gone"))
    life.decider.learn(step_complete=False)
    assert look_ahead.steps == 1, "what came meanwhile is forgotten"


def test_it_forecasts_by_the_present_step_time_from_now_on() -> None:
    ahead = LookAhead(CapSignal(WorkProfile()))
    life = Life(ahead)
    life.cluster.fix_step_time(StepTime(5e-3, 1e-7, 4e-5, 1e-5))
    life.decider.follow()
    assert (ahead.profile.request_tokens, ahead.profile.prefill_beta) == pytest.approx((400, 100))
    life.cluster.fix_step_time(None)
    life.decider.follow()
    assert ahead.profile == WorkProfile(prefill_beta=PROMPT_RATIO), "nothing is learned yet"
    life.cluster.groups["default"].prompt_budget = StepBudget(300)
    life.decider.refresh()
    assert ahead.profile.prefill_chunk == 300
    without = Life()
    without.decider.follow()
    without.decider.refresh()
    assert without.decider.look_ahead is None


def test_the_objective_of_what_bfio_solved_is_noted() -> None:
    life = Life()
    assert life.decider.solved is None
    life.arrive()
    life.decide()
    assert life.decider.solved is life.policy.last is not None
    assert life.decider.stats.decision_objective.total == life.policy.last.solution.objective > 0


def test_a_worker_alone_has_no_objective() -> None:
    life = Life()
    life.arrive()
    life.decide()
    for worker_id in "ab":
        life.cluster.apply(WorkerDown(worker_id, "gone"))
    life.arrive()
    assert [worker_id for _, worker_id in life.decide()] == ["c"]
    assert life.decider.solved is None
    assert sum(life.decider.stats.decision_objective.counts) == 1


def test_a_round_that_the_fallback_decides_has_no_objective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life = Life()
    life.arrive()
    life.decide()
    solve = life.policy.assign
    monkeypatch.setattr(life.policy, "assign", lambda *asked: solve(*asked)[1:])
    life.arrive()
    assert len(life.decide()) == 1
    assert life.decider.stats.policy_errors == 1
    assert life.decider.solved is None
    assert sum(life.decider.stats.decision_objective.counts) == 1


def test_the_caller_receives_the_error_of_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life()
    errors: list[Exception] = []
    life.decider.on_policy_error = errors.append
    monkeypatch.setattr(life.policy, "assign", lambda *asked: ())
    life.arrive()
    assert len(life.decide()) == 1
    monkeypatch.setattr(life.policy, "assign", lambda *asked: [][len(asked)])
    life.arrive()
    assert len(life.decide()) == 1
    assert [type(error) for error in errors] == [PolicyError, IndexError]
    assert all(error.__traceback__ for error in errors)


@pytest.mark.parametrize("signal", [CapSignal, SurvivalSignal])
def test_what_others_have_on_a_worker_counts(signal: type[CapSignal | SurvivalSignal]) -> None:
    life = Life(LookAhead(signal()))
    busy = Gauges(running=1, kv_usage=0.5, kv_tokens=2000)
    life.cluster.apply(GaugesReceived("a", busy, 0.0))
    for _ in range(6):
        life.arrive()
    assert {worker_id for _, worker_id in life.decide()} == {"b", "c"}


def test_caches_count_before_any_step_has_taught_what_prompts_cost() -> None:
    life = Life(LookAhead(CapSignal()))
    life.cluster.groups["default"].prefix_hits = lambda _: [0, 90, 0]
    life.arrive()
    ((_, worker_id),) = life.decide()
    assert worker_id == "b"


def test_without_steps_bfio_is_barrier_time() -> None:
    """It goes by guesses of caches and costs, and sends at once: who is busy is not known."""
    rng = random.Random(0)
    ours, theirs = Life(LookAhead(CapSignal())), Life()
    theirs.decider.policy = PerRequest(barrier_time)
    texts = [chain(range(100 * n, 100 * n + 6000), seed()) for n in range(6)]
    went, under_way = dict[str, list[str]](), list[str]()
    for _ in range(120):
        content = Content(pieces=rng.choice(texts)[: 8 * rng.randrange(1, 375)])
        if len(under_way) == 3 * SLOTS - 1:
            gone = under_way.pop(rng.randrange(len(under_way)))
            ours.end(gone)
            theirs.end(gone)
        elif under_way and rng.random() < 0.9:
            for life in (ours, theirs):
                life.cluster.apply(Began(under_way[-1], "", 0.0))
        for life in (ours, theirs):
            sent = life.arrive(2 * len(content.pieces), content)
            ((_, worker_id),) = life.decide()
            went.setdefault(sent, []).append(worker_id)
        under_way.append(sent)
    assert all(one == other for one, other in went.values())
    assert ours.cluster.groups["default"].prefixes.guessed_tokens > 100_000


def test_it_learns_whether_caches_differ() -> None:
    life = Life(LookAhead(CapSignal()))
    life.cluster.groups["default"].prefix_hits = lambda _: [0, 90, 0]
    life.arrive()
    life.arrive()
    life.decide()
    assert life.decider.affinity.share == pytest.approx((90 - 30) / 100)


@pytest.mark.parametrize("cached", [[0, 90, 0], [90, 90, 90]])
def test_where_slots_are_short_prompts_are_planned_only_if_caches_differ(cached: list[int]) -> None:
    life = Life(LookAhead(CapSignal()))
    life.cluster.groups["default"].prefix_hits = lambda _: cached
    for _ in range(3 * SLOTS + 2):
        life.arrive()
    first = life.decide()
    assert life.policy.last is not None, "nothing is known yet"
    life.end(first[0].request_id)
    assert len(life.decide()) == 1
    assert (life.policy.last is None) == (cached[0] == 0)


def test_requests_stand_aside_as_long_as_they_wait() -> None:
    life = Life()
    waiting = [life.arrive() for _ in range(3 * SLOTS + 1)]
    life.decide()
    life.decider.backfill.aside = {"gone", waiting[-1]}
    life.arrive()
    life.end(waiting[0])
    life.decide()
    assert life.decider.backfill.aside == {waiting[-1]}
