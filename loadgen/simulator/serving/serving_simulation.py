"""Whole engines in virtual time, under the live router's own core.

Engines compute prompts in chunks, cache prefixes and run out of KV memory (``loadgen.engine``).
Behind a barrier a step of all ranks takes as long as the slowest needs; without one each steps
alone. After a step each rank's snapshot reaches the live ``Cluster``, from which ``RoundDecider``
decides, as in the live router: on a request's arrival by the state after the last step, and for
those that wait at each step's end.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from math import inf
from operator import attrgetter

from loadgen.engine.engine import Engine
from loadgen.engine.prefix_cache import PrefixCache
from loadgen.engine.request import EngineRequest
from loadgen.engine.schedule import Schedule
from loadgen.simulator.decode.decode_config import SERVE
from loadgen.simulator.decode.simulated_router import end_by
from loadgen.simulator.serving.rank import Rank
from loadgen.simulator.serving.serving_config import AUTO, ServingConfig
from loadgen.simulator.serving.serving_results import Row, ServingRecorder, ServingResult
from loadgen.simulator.serving.turns import Turn, turns_of
from router.core.events import Arrived, Dispatched, Ended, SnapshotReceived, WorkerUp
from router.core.forecast.forecast import WorkProfile
from router.core.forecast.look_ahead import SIGNALS, LookAhead
from router.core.policies.policy_protocol import Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.prompt_budget import PromptBudget
from router.core.queue.pool import Pool
from router.core.rounds.barriers import Allot, allot
from router.core.rounds.decider import Decider
from router.core.rounds.overcommit import Overcommit
from router.core.rounds.sharing import Sharing
from router.core.state.cluster import Cluster
from router.core.state.group_budget import GroupBudget
from router.core.state.rates import SendDelay
from router.core.types import Outcome, Request, WorkerSpec


def simulate_serving(
    config: ServingConfig,
    *,
    policy: Policy | None = None,
    allot: Allot = allot,
    keep_records: bool = False,
) -> ServingResult:
    """Run one simulation; equal configurations give equal results.

    ``policy`` replaces the configured one, ``allot`` the live router's choice of a group.
    """
    return _Simulation(config, policy, allot).run(keep_records=keep_records)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Ranks that one decider serves; ``speed``: of their steps, as in ``ServingConfig``."""

    ranks: Sequence[Rank]
    speed: float
    decider: Decider
    budget: GroupBudget | None


@dataclass(slots=True, eq=False)
class _Domain:
    """Ranks that step together.

    Attributes:
        on_way: requests on their way to a rank, with the step before which they arrive.
        schedules, needed_s, rows: of the step that they take, by rank; as in ``ServingRecords``.
        ends_s: its end; infinite while they rest.
    """

    group: _Group
    ranks: Sequence[Rank]
    step: int = 0
    on_way: deque[tuple[int, Rank, EngineRequest]] = field(default_factory=deque)
    schedules: Sequence[Schedule] = ()
    needed_s: Sequence[float] = ()
    rows: Sequence[Row] = ()
    ends_s: float = inf

    def deliver(self, *, every: bool) -> None:
        """Hand requests that have been on their way for long enough to their engines."""
        while self.on_way and (every or self.on_way[0][0] <= self.step):
            _, rank, request = self.on_way.popleft()
            rank.add(request)


class _Simulation:
    def __init__(self, config: ServingConfig, policy: Policy | None, allot: Allot) -> None:
        self._config = config
        self._turns = turns_of(config)
        self._recorder = ServingRecorder(self._turns, int(config.warmup * config.requests))
        arriving = [(t.arrival_s, t.number) for t in self._turns if t.arrival_s is not None]
        self._arriving: list[tuple[float, int]] = arriving
        heapq.heapify(self._arriving)
        # Closed clients send the next one at each end.
        closed = config.arrivals.kind == "closed"
        self._unsent = iter(self._turns[len(arriving) :] if closed else ())
        self._behind: deque[Request] = deque()
        self._turn_of: dict[str, Turn] = {}
        self._hits: dict[tuple[str, str], Sequence[int]] = {}
        self._pool = Pool(config.pool, config.starvation_s)
        self._cluster = Cluster((), lockstep=set(config.groups) if config.barrier else ())
        self._groups = [self._new_group(name, policy) for name in config.groups]
        self._join(allot)
        self._domains = [
            _Domain(group, ranks)
            for group in self._groups
            for ranks in ([group.ranks] if config.barrier else [[rank] for rank in group.ranks])
        ]
        self._rank_of = {
            rank.worker_id: (domain, rank) for domain in self._domains for rank in domain.ranks
        }

    def run(self, *, keep_records: bool) -> ServingResult:
        now_s = 0.0
        while self._recorder.completed < len(self._turns):
            self._arrivals(now_s)
            for domain in self._domains:
                if domain.ends_s == inf:
                    self._begin(domain, now_s)
            next_ = min(self._domains, key=attrgetter("ends_s"))
            if self._arriving and self._arriving[0][0] <= next_.ends_s:
                now_s = self._arriving[0][0]
            else:
                now_s = next_.ends_s
                self._end(next_)
        fitted = [each.decider.group.step_time for each in self._groups]
        learned = {"learned_step_time": " and ".join(map(str, filter(None, fitted))) or None}
        return self._recorder.result(
            now_s, self._config.described() | learned, keep_records=keep_records
        )

    def _new_group(self, name: str, policy: Policy | None) -> _Group:
        config = self._config
        given = config.groups[name]
        ranks = [Rank(f"{name}-{i:04}", name, i, _engine(config)) for i in range(given.workers)]
        for rank in ranks:
            self._cluster.join(WorkerSpec(rank.worker_id, "", name, slots=config.slots))
        group = self._cluster.groups[name]
        group.prefix_hits = partial(self._hits_of, ranks)
        group.rates.delay = SendDelay(config.dispatch_delay)
        for rank in ranks:
            self._cluster.apply(WorkerUp(rank.worker_id))
        # Ranks behind a barrier are up once all are.
        for rank in ranks:
            snapshot = rank.snapshot(0.0, 0, 0.0, None)
            self._cluster.apply(SnapshotReceived(rank.worker_id, snapshot, 0.0))
        row = POLICIES[config.policy]
        profile = WorkProfile(prefill_chunk=config.batch_tokens)
        policy = policy or row.make(PolicySettings(seed=config.seed))
        decider = Decider(
            group,
            self._pool,
            policy,
            policy,
            config.dispatch,
            LookAhead(SIGNALS[SERVE["lookahead"]](profile), profile) if row.looks_ahead else None,
            Overcommit(SERVE["overcommit"]),
            on_policy_error=end_by,
        )
        asked = any(each.targets and each.targets.tpot_s for each in config.classes)
        budget = None
        if not isinstance(config.prompt_budget, int):
            auto = config.prompt_budget == AUTO or asked
            bound = PromptBudget(config.targets, config.batch_tokens) if auto else None
            budget = GroupBudget(group, bound)
        return _Group(ranks, given.speed, decider, budget)

    def _join(self, allot: Allot) -> None:
        """As the live router does where groups serve the same requests."""
        first, *others = deciders = [each.decider for each in self._groups]
        for other in others:
            first.group.line.merge(other.group.line)
        sharing = Sharing(deciders, allot)
        for each in deciders:
            each.sharing = sharing

    def _begin(self, domain: _Domain, now_s: float) -> None:
        """Begin a step if there is work; requests that arrive meanwhile see the state before it."""
        config, ranks = self._config, domain.ranks
        domain.deliver(every=not any(rank.engine.unfinished for rank in ranks))
        if not any(rank.engine.unfinished for rank in ranks):
            return
        if (budget := domain.group.budget) is not None:
            for rank in ranks:
                chosen = budget.of(rank.worker_id)
                rank.engine.prompt_budget = chosen and chosen.at(domain.step)
        # Without a request that decodes, nothing gains from a step without prompts.
        prefill = domain.step in config.prefill_window or not any(rank.decodes for rank in ranks)
        domain.schedules = [rank.begin(now_s, prefill=prefill) for rank in ranks]
        domain.needed_s = [
            config.step_time.seconds(
                rank.engine.batch_tokens,
                len(rank.engine.batch),
                schedule.prefill_tokens,
                domain.group.speed,
            )
            for rank, schedule in zip(ranks, domain.schedules, strict=True)
        ]
        domain.rows = [
            (rank.resident_tokens, len(rank.engine.batch), schedule.prefill_tokens)
            for rank, schedule in zip(ranks, domain.schedules, strict=True)
        ]
        domain.ends_s = now_s + max(domain.needed_s)

    def _end(self, domain: _Domain) -> None:
        now_s, ranks, seconds = domain.ends_s, domain.ranks, max(domain.needed_s)
        domain.ends_s = inf
        domain.step += 1
        generated = sum(rank.engine.generated_total for rank in ranks)
        complete = False
        for rank in ranks:
            snapshot = rank.finish(now_s, domain.step, seconds)
            complete |= self._cluster.apply(SnapshotReceived(rank.worker_id, snapshot, now_s))
        for rank in ranks:
            self._account(rank, now_s)
        generated = sum(rank.engine.generated_total for rank in ranks) - generated
        preempted = sum(len(schedule.preempted) for schedule in domain.schedules)
        self._recorder.step(now_s, seconds, domain.needed_s, domain.rows, generated, preempted)
        group = domain.group
        group.decider.learn(step_complete=complete)
        if complete and group.budget is not None:
            group.budget.step_ended()
            group.decider.refresh()
        self._round(now_s, [group])

    def _account(self, rank: Rank, now_s: float) -> None:
        for request in rank.entered:
            self._recorder.first_token(self._turn_of[request.id], request, now_s)
        for request in rank.ended:
            turn = self._turn_of.pop(request.id)
            self._recorder.ended(turn, now_s)
            self._cluster.apply(Ended(request.id, Outcome.COMPLETED, now_s))
            for following in chain(turn.following, islice(self._unsent, 1)):
                following.arrival_s = now_s + following.think_s
                heapq.heappush(self._arriving, (following.arrival_s, following.number))

    def _arrivals(self, until_s: float) -> None:
        while self._arriving and self._arriving[0][0] <= until_s:
            at_s, number = heapq.heappop(self._arriving)
            turn = self._turns[number]
            request = Request(
                f"es-{number:020x}",
                self._groups[0].decider.group.name,
                turn.prompt_tokens,
                arrival_s=at_s,
                exact=True,
                targets=turn.class_.targets,
            )
            self._turn_of[request.id] = turn
            self._recorder.arrived(turn, at_s)
            self._cluster.apply(Arrived(request))
            self._behind.append(request)
            self._round(at_s, self._groups)

    def _round(self, now_s: float, groups: Sequence[_Group]) -> None:
        """Assign waiting requests to workers with free capacity, and send them."""
        pool = self._pool
        while self._behind and not pool.full:
            pool.add(self._behind.popleft())
        self._hits.clear()
        for group in groups:
            if len(pool):
                self._send(group, now_s)

    def _send(self, group: _Group, now_s: float) -> None:
        pool = self._pool
        for request_id, worker_id in group.decider.decide(now_s, lambda: now_s):
            pool.remove(request_id)
            self._cluster.apply(Dispatched(request_id, worker_id, now_s))
            turn = self._turn_of[request_id]
            request = EngineRequest(
                request_id,
                turn.prompt_tokens,
                turn.output_tokens,
                arrived_s=now_s,
                chain=turn.chain,
            )
            domain, rank = self._rank_of[worker_id]
            domain.on_way.append((domain.step + self._config.dispatch_delay, rank, request))
            if not self._config.dispatch_delay:
                domain.deliver(every=True)

    def _hits_of(self, ranks: Sequence[Rank], request: Request) -> Sequence[int]:
        """Cached tokens of a prompt by worker; they hold within a round."""
        key = request.id, ranks[0].worker_id
        hits = self._hits.get(key)
        if hits is None:
            turn = self._turn_of[request.id]
            hits = self._hits[key] = [
                rank.engine.hit_tokens(turn.chain, turn.prompt_tokens) for rank in ranks
            ]
        return hits


def _engine(config: ServingConfig) -> Engine:
    return Engine(
        config.slots,
        config.kv_tokens,
        block_tokens=config.block_tokens,
        chunk=config.batch_tokens,
        prompt_budget=None if config.prompt_budget == AUTO else config.prompt_budget,
        prefix_cache=PrefixCache(),
    )
