"""Whole engines in virtual time: figures by hand, prefixes, windows, sessions, the command."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.simulator.serving.serving_command import ARRIVALS, ServingOptions
from loadgen.simulator.serving.serving_config import (
    AUTO,
    PrefillWindow,
    RankGroup,
    ServingConfig,
)
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.simulator.serving.turns import turns_of
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import BUNDLED, Trace, TraceRequest, load_trace
from router.core.errors import ConfigError, InputError
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.rounds.barriers import Barrier
from router.core.step_time import StepTime
from router.core.targets import Targets
from router.core.types import Assignment, Dispatch, Request, WorkerView

# A second a step, a millisecond per resident token, a tenth of a second per prompt token.
COST = StepTime(1.0, 1e-3, per_prompt_token_s=0.1)
Row = tuple[float, int, int, tuple[int, ...]]


def config(rows: Sequence[Row], **changes: Any) -> ServingConfig:
    """Requests by arrival, prompt, output and block ids."""
    trace = Trace(
        "made", "Mooncake", tuple(TraceRequest(p, o, at_s, ids) for at_s, p, o, ids in rows)
    )
    given: dict[str, Any] = {
        "policy": "least_prefill",
        "trace": trace,
        "arrivals": Arrivals("trace", 1.0),
        "requests": len(rows),
        "workers": 2,
        "slots": 4,
        "kv_tokens": 8192,
        "batch_tokens": 1024,
        "step_time": COST,
        "dispatch": Dispatch.INSTANT,
        "warmup": 0.0,
    }
    return ServingConfig(**given | changes)


class Witness(Policy):
    """A policy that keeps what it is shown, and does as another one."""

    def __init__(self, name: str) -> None:
        self._policy = POLICIES[name].make(PolicySettings())
        self.seen: list[tuple[list[Request], list[WorkerView], Known, list[int]]] = []

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        assert known.hits is not None
        self.seen.append((list(waiting), list(workers), known, list(known.hits(waiting[-1]))))
        return self._policy.assign(waiting, workers, known)


def test_every_figure_of_a_run_of_three_steps() -> None:
    # Step 1: 10 prompt tokens on one rank, 2.01 s. Step 2: 11 tokens there, 20 prompt tokens on the
    # other, 3.02 s. Step 3: 21 tokens there, 1.021 s.
    result = simulate_serving(config([(0.0, 10, 2, ()), (1.5, 20, 2, ())]))
    assert result.completed == 2
    steps = [2.01, 3.02, 1.021]
    assert result.step_mean_s == pytest.approx(sum(steps) / 3)
    first, second = 2.01, 2.01 + 3.02 - 1.5
    assert result.ttft_mean_s == pytest.approx((first + second) / 2)
    assert result.ttft_p99_s == pytest.approx(first + 0.99 * (second - first))
    assert result.ttft_p50_s == pytest.approx(result.ttft_mean_s)
    assert result.tpot_mean_s == pytest.approx((3.02 + 1.021) / 2)
    assert result.tpot_p99_s == pytest.approx(1.021 + 0.99 * (3.02 - 1.021))
    assert result.throughput_tok_s == pytest.approx(4 / sum(steps))
    assert result.latency_mean_s == pytest.approx((2.01 + 3.02 + second + 1.021) / 2)
    waited = (2.01 - 1) + (3.02 - 1.011) + (1.021 - 1)
    assert result.idle_share == pytest.approx(waited / 2 / sum(steps))
    assert result.prefix_hit_share == 0
    assert result.evictions_per_1k == 0


@pytest.mark.parametrize("barrier", [True, False])
def test_groups_of_one_model_step_apart_and_share_what_waits(*, barrier: bool) -> None:
    # One is alone in the first group: 2.01 and 1.011 s. The other goes to that of half the speed:
    # twice 3.02 and twice 1.021 s.
    rows: list[Row] = [(0.0, 10, 2, ()), (1.5, 20, 2, ())]
    beside = (RankGroup(2, 0.5),)
    result = simulate_serving(config(rows, beside=beside, barrier=barrier))
    assert result.ttft_mean_s == pytest.approx((2.01 + 6.04) / 2)
    assert result.latency_mean_s == pytest.approx((2.01 + 1.011 + 6.04 + 2.042) / 2)
    assert result.step_mean_s == pytest.approx((2.01 + 1.011 + 6.04 + 2.042) / 4)
    waited = (2.01 - 1) + (1.011 - 1) + 2 * (3.02 - 1) + 2 * (1.021 - 1)
    whole = 2 * (2.01 + 1.011 + 6.04 + 2.042)
    assert result.idle_share == pytest.approx(barrier * waited / whole)
    assert result.parameters["beside"] == "2:0.5"


def test_another_choice_of_a_group_in_its_place() -> None:
    rows: list[Row] = [(0.0, 10, 1, ()), (0.5, 10, 1, ())]

    def second(
        waiting: Iterable[Request], barriers: Mapping[str, Barrier]
    ) -> Mapping[str, set[str]]:
        assert list(barriers) == ["default", "beside1"]
        return {"default": set(), "beside1": {request.id for request in waiting}}

    beside = (RankGroup(1, 2.0),)
    result = simulate_serving(config(rows, workers=1, beside=beside), allot=second)
    assert result.latency_mean_s == pytest.approx((1.005 + 2 * 1.005 - 0.5) / 2)


def test_without_a_barrier_each_worker_steps_alone() -> None:
    # One takes 2.01 and 1.011 s from 0 on, the other 3.02 and 1.021 s from 1.5 s on.
    result = simulate_serving(config([(0.0, 10, 2, ()), (1.5, 20, 2, ())], barrier=False))
    assert result.ttft_mean_s == pytest.approx((2.01 + 3.02) / 2)
    assert result.tpot_mean_s == pytest.approx((1.011 + 1.021) / 2)
    assert result.step_mean_s == pytest.approx((2.01 + 1.011 + 3.02 + 1.021) / 4)
    assert result.throughput_tok_s == pytest.approx(4 / (1.5 + 3.02 + 1.021))
    assert result.idle_share == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"dispatch": Dispatch.POOL, "dispatch_delay": 2},
        {"arrivals": Arrivals("closed", 3), "dispatch_delay": 1},
        {
            "prompt_budget": AUTO,
            "targets": Targets(tpot_s=2.0),
            "prefill_window": PrefillWindow(1, 3),
        },
    ],
)
def test_of_one_worker_a_barrier_changes_nothing(changes: dict[str, Any]) -> None:
    rows = [(3.0 * n, 100 + n, 1 + n % 7, (n % 4, n)) for n in range(40)]
    together, alone = (
        simulate_serving(config(rows, workers=1, barrier=barrier, **changes))
        for barrier in (True, False)
    )
    assert alone.parameters == together.parameters | {"barrier": False}
    assert replace(alone, parameters=together.parameters) == together


def test_the_warm_up_counts_in_nothing() -> None:
    # These hit, are evicted, and have left for long when the others come.
    before: list[Row] = [(0.0, 900, 300, (7,))] * 6
    rows: list[Row] = [(0.0, 10, 2, ()), (1.5, 20, 2, ()), (2.5, 10, 1, ())]
    later = [(row[0] + 20_000, *row[1:]) for row in rows]
    alone, after = (
        simulate_serving(config(some, kv_tokens=2048, warmup=warmup), keep_records=True)
        for some, warmup in ((rows, 0.0), ([*before, *later], 0.67))
    )
    assert alone.misses == after.misses
    apart = dict.fromkeys(("completed", "parameters", "met_by_class", "misses"), 0)
    ones, others = (run.report() | apart for run in (alone, after))
    assert others == pytest.approx(ones)
    assert after.records is not None
    assert after.records.seconds == pytest.approx([2.01])


def test_the_router_sees_prompts_not_computed_and_what_is_cached() -> None:
    rows = [(0.0, 1100, 3, (1, 2, 3)), (1.0, 1100, 3, (1, 2, 9)), (400.0, 1100, 3, (1, 2, 4))]
    witness = Witness("least_prefill")
    simulate_serving(config(rows, batch_tokens=600), policy=witness)
    (_, idle, _, nothing), (_, busy, _, part), (_, again, _, cached) = witness.seen
    assert [view.pending_prompt_tokens for view in idle] == [0, 0]
    assert nothing == [0, 0]
    assert [view.pending_prompt_tokens for view in busy] == [1100, 0], "sent, not shown yet"
    assert part == [512, 0], "what the step under way computes of 1,100 tokens"
    assert [view.pending_prompt_tokens for view in again] == [0, 0]
    assert cached == [1024, 1024]


def test_what_is_cached_is_told_anew_in_each_round() -> None:
    rows = [(0.0, 10, 2, ()), (0.1, 1100, 2, (1, 2, 3)), (0.2, 1100, 2, (1, 2, 4))]
    witness = Witness("least_prefill")
    simulate_serving(config(rows, workers=1, slots=1, dispatch=Dispatch.POOL), policy=witness)
    assert [hits for *_, hits in witness.seen] == [[0], [0], [1024]]


def test_a_cached_prefix_is_not_computed_again() -> None:
    rows = [(0.0, 1100, 1, (1, 2, 3)), (300.0, 1100, 1, (1, 2, 4))]
    alone = simulate_serving(config(rows, workers=1, warmup=0.5))
    assert alone.prefix_hit_share == pytest.approx(1024 / 1100)
    assert alone.ttft_mean_s == pytest.approx(1 + 1.1 + 7.6)


@pytest.mark.parametrize(("workers", "share"), [(1, 512 / 1024 / 2), (2, 0.0)])
def test_of_two_that_enter_in_one_step_the_second_hits_on_the_same_rank(
    workers: int, share: float
) -> None:
    rows = [(0.0, 1024, 2, (1, 2))] * 2
    together = simulate_serving(config(rows, workers=workers, batch_tokens=4096))
    assert together.prefix_hit_share == share


def test_small_blocks_split_the_traces() -> None:
    rows = [(0.0, 1100, 1, (1, 2, 3)), (300.0, 1100, 1, (1, 2, 3))]
    alone = simulate_serving(config(rows, workers=1, warmup=0.5, block_tokens=16))
    assert alone.prefix_hit_share == pytest.approx(1088 / 1100)


def test_a_prompt_budget_and_a_window_make_prompts_wait() -> None:
    rows = [(0.0, 1000, 9, ()), (5.0, 400, 2, ())]
    plain = simulate_serving(config(rows, workers=1, warmup=0.5))
    assert plain.ttft_mean_s == pytest.approx(102 - 5 + 1 + 1.401 + 40)
    bounded = simulate_serving(config(rows, workers=1, warmup=0.5, prompt_budget=200))
    assert bounded.step_mean_s < plain.step_mean_s
    # The first prompt takes step 0; then one request decodes, and steps 1 to 3 are closed.
    closed = simulate_serving(
        config(rows, workers=1, warmup=0.5, prefill_window=PrefillWindow(1, 4))
    )
    further = 2.001 + 2.002 + 2.003 + 0.003
    assert closed.ttft_mean_s == pytest.approx(plain.ttft_mean_s + further)


def test_a_window_holds_back_nobody_while_nothing_decodes() -> None:
    rows = [(0.0, 2000, 1, ())]
    free, closed = (
        simulate_serving(config(rows, prefill_window=PrefillWindow(1, every))) for every in (1, 50)
    )
    assert free.ttft_mean_s == closed.ttft_mean_s


def test_without_memory_requests_are_evicted_and_come_back() -> None:
    rows = [(0.0, 900, 300, ()), (0.0, 900, 300, ())]
    result = simulate_serving(config(rows, workers=1, kv_tokens=2048))
    assert result.completed == 2
    assert result.evictions_per_1k == 500


def test_sessions_wait_for_their_answers() -> None:
    rows = [
        (0.0, 1100, 100, (1, 2, 3)),
        (0.1, 1500, 1, (7, 8, 9)),
        (0.2, 1700, 5, (1, 2, 5, 6)),
        (0.3, 4000, 5, (1, 2, 5, 10, 11, 12, 13, 14)),
    ]
    turns = turns_of(config(rows, think=2.0))
    assert [[after.number for after in turn.following] for turn in turns] == [[2], [], [3], []]
    assert [turn.arrival_s for turn in turns] == [0.0, 0.1, None, None]
    assert all(turn.think_s > 0 for turn in turns[2:])
    # The answer, as far as the next prompt repeats it in whole blocks, is part of the chain.
    assert turns[0].chain == [(1, 0), (2, 0)]
    assert turns[2].chain == [(1, 0), (2, 0), (5, 0)]
    result = simulate_serving(config(rows, think=2.0, workers=1))
    assert result.completed == 4
    assert result.prefix_hit_share == pytest.approx((1024 + 1536) / sum(row[1] for row in rows))


def test_a_turn_comes_its_think_time_after_the_answer() -> None:
    rows = [(0.0, 1100, 1, (1, 2, 3)), (0.2, 1700, 1, (1, 2, 5))]
    given = config(rows, think=2.0)
    witness = Witness("least_prefill")
    simulate_serving(given, policy=witness)
    think_s = turns_of(given)[1].think_s
    answered_s = (1 + 1.024 + 102.4) + (1 + 1.1 + 7.6)
    assert witness.seen[1][0][0].arrival_s == pytest.approx(answered_s + think_s)
    assert turns_of(replace(given, think=4.0))[1].think_s == 2 * think_s
    assert turns_of(replace(given, seed=1))[1].think_s != think_s


def test_a_session_may_have_prompts_without_ids() -> None:
    rows = [(0.0, 600, 5, (1, 2)), (0.1, 600, 5, ()), (0.2, 1100, 5, (1, 3, 4))]
    turns = turns_of(config(rows, think=1.0))
    assert [[after.number for after in turn.following] for turn in turns] == [[2], [], []]


def test_a_request_is_continued_once() -> None:
    rows = [(0.0, 600, 5, (1, 2)), (0.1, 1100, 5, (1, 3, 4)), (0.2, 1100, 5, (1, 5, 6))]
    turns = turns_of(config(rows, think=1.0))
    assert [[after.number for after in turn.following] for turn in turns] == [[1], [], []]


def test_a_prompt_that_holds_no_answer_continues_nothing() -> None:
    rows = [(0.0, 600, 700, (1, 2)), (0.1, 1100, 5, (1, 3, 4))]
    assert all(not turn.following for turn in turns_of(config(rows, think=1.0)))


@pytest.mark.parametrize("policy", ["bfio", "barrier_time", "jsq", "prefix_score"])
@pytest.mark.parametrize("dispatch", Dispatch)
@given(
    rows=st.lists(
        st.tuples(
            st.floats(0, 90),
            st.integers(1, 2600),
            st.integers(1, 40),
            st.lists(st.integers(0, 5), unique=True).map(tuple),
        ),
        min_size=1,
        max_size=14,
    ),
    think=st.sampled_from([None, 1.0]),
)
@settings(max_examples=12, deadline=None)  # the first one compiles
def test_everybody_is_served_and_equal_runs_are_equal(
    policy: str, dispatch: Dispatch, rows: list[Row], think: float | None
) -> None:
    think = think if any(ids for *_, ids in rows) else None
    seen = config(rows, policy=policy, dispatch=dispatch, think=think, kv_tokens=4096)
    result = simulate_serving(seen)
    assert result.completed == len(rows)
    assert result == simulate_serving(seen)
    assert 0 <= result.prefix_hit_share < 1
    assert 0 <= result.idle_share < 1
    assert result.ttft_p50_s <= result.ttft_p99_s


def test_the_same_requests_for_every_policy() -> None:
    rows = [(0.0, 10, 2, ())] * 5
    drawn = [
        [turn.arrival_s for turn in turns_of(config(rows, arrivals=arrivals, seed=seed))]
        for arrivals, seed in (
            (Arrivals("poisson", 2.0), 1),
            (Arrivals("poisson", 2.0), 1),
            (Arrivals("poisson", 2.0), 2),
            (Arrivals("poisson", 1.0), 1),
        )
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[3] == pytest.approx([2 * (at_s or 0) for at_s in drawn[0]])


def test_closed_clients_send_the_next_request_when_they_have_their_answer() -> None:
    # One client: each request computes its prompt alone and decodes alone.
    rows = [(0.0, 10, 2, ())] * 3
    alone = config(rows, arrivals=Arrivals.parse("closed:1", ARRIVALS), workers=1)
    result = simulate_serving(alone, keep_records=True)
    assert result.ttft_mean_s == pytest.approx(2.01)
    assert result.records is not None
    # Records end with the last arrival: the steps of the first two requests.
    assert result.records.seconds == pytest.approx([2.01, 1.011] * 2)
    assert result.records.loads.tolist() == [[10], [11]] * 2
    assert result.records.tokens.tolist() == [1, 1] * 2
    assert result.records.running.tolist() == [[1], [1]] * 2
    assert result.records.prompts.tolist() == [[10], [0]] * 2
    assert result.records.needed_s[:, 0] == pytest.approx(result.records.seconds)
    assert "records" not in result.report()


def test_two_clients_keep_two_requests_inside() -> None:
    rows = [(0.0, 10, 5, ())] * 12
    shared = config(rows, arrivals=Arrivals.parse("closed:2", ARRIVALS), workers=1)
    records = simulate_serving(shared, keep_records=True).records
    assert records is not None
    assert records.loads.min() >= 20


def test_a_delay_holds_a_freed_slot_for_its_steps() -> None:
    rows = [(0.0, 10, 3, ())] * 2
    pool = {"workers": 1, "slots": 1, "dispatch": Dispatch.POOL, "policy": "least_tokens"}
    soon, later = (simulate_serving(config(rows, **pool, dispatch_delay=delay)) for delay in (0, 2))
    # With the engine empty, nothing is waited for: the request comes when it comes.
    assert later.ttft_p99_s == pytest.approx(soon.ttft_p99_s)
    busy = [(0.0, 10, 9, ()), *rows]
    soon, later = (
        simulate_serving(config(busy, **pool | {"slots": 2}, dispatch_delay=delay))
        for delay in (0, 2)
    )
    assert later.ttft_p99_s == pytest.approx(soon.ttft_p99_s + 2 * 1.01, abs=0.1)


def test_times_of_a_trace_are_scaled() -> None:
    rows = [(4.0, 10, 2, ()), (3.0, 10, 2, ())]
    scaled = turns_of(config(rows, arrivals=Arrivals.parse("trace:2", ARRIVALS)))
    assert [turn.arrival_s for turn in scaled] == [0.0, 2.0]
    with pytest.raises(InputError, match="has no arrival times"):
        replace(config(rows), trace=Trace("x", "y", (TraceRequest(1, 1),) * 2))


def test_what_is_checked_is_what_runs() -> None:
    rows = [(9.0, 10, 2, ()), (8.0, 10, 2, ()), (0.0, 8999, 2, ())]
    with pytest.raises(ConfigError, match="has 9001 tokens and fits no worker"):
        config(rows, requests=2)
    drawn = config(rows, requests=2, arrivals=Arrivals.parse("poisson:1", ARRIVALS))
    assert simulate_serving(drawn).completed == 2


def test_what_a_trace_must_have() -> None:
    with pytest.raises(InputError, match="has 1 usable requests, not 2"):
        config([(0.0, 1, 1, ())], requests=2)
    with pytest.raises(InputError, match="--think needs a trace with hash_ids"):
        config([(0.0, 1, 1, ())], think=1.0)
    with pytest.raises(ConfigError, match="--block-tokens must divide 512"):
        config([(0.0, 600, 1, (1, 2))], block_tokens=100)
    with pytest.raises(ConfigError, match="has 9000 tokens and fits no worker"):
        config([(0.0, 8999, 1, ())])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--policy best", "--policy: unknown policy 'best'"),
        ("--policy fcfs --dispatch instant", "policy fcfs can dispatch by pool only"),
        ("--arrivals poisson", "--arrivals: 'poisson' is unknown"),
        ("--arrivals poisson:", "--arrivals: 'poisson:' is unknown"),
        ("--arrivals poisson:x", "--arrivals: 'poisson:x' is unknown"),
        ("--arrivals poisson:0", "--arrivals: 'poisson:0' is unknown"),
        ("--arrivals full", "--arrivals: 'full' is unknown"),
        ("--arrivals trace:1,2", "--arrivals: 'trace:1,2' is unknown"),
        ("--prefill-window 0/4", "--prefill-window takes OPEN/OF"),
        ("--prefill-window 5/4", "--prefill-window takes OPEN/OF"),
        ("--prefill-window 1", "--prefill-window takes OPEN/OF"),
        ("--prompt-budget most", "--prompt-budget takes auto or a number of tokens, got 'most'"),
        ("--target-tpot 0.04", "--target-ttft and --target-tpot need --prompt-budget auto"),
        ("--prompt-budget 512 --target-ttft 1", "need --prompt-budget auto"),
        ("--prompt-budget auto --target-ttft 0", "target_ttft takes seconds above 0"),
        ("--prompt-budget 0", "--prompt-budget must be from 1"),
        (f"--prompt-budget {5000 * '9'}", "--prompt-budget takes auto or a number of tokens"),
        (f"--arrivals closed:{5000 * '9'}", "--arrivals: 'closed:999"),
        (f"--prefill-window 1/{5000 * '9'}", "--prefill-window takes OPEN/OF"),
        (f"--seed {400 * '9'}", "--seed must be from 0"),
        (f"--kv-tokens {400 * '9'}", "--kv-tokens must be from 1"),
        ("--step-time 1e308,1e308", "--step-time takes C,t_l[,t_r[,t_p]]"),
        ("--beside 0", "--beside takes G[:SPEED],..., as 8,4:.5"),
        ("--beside 8,4:0", "got '8,4:0'"),
        ("--beside 8:", "got '8:'"),
        ("--beside 9999", "got '9999'"),
        ("--warmup 1", "--warmup must be from 0 to below 1"),
        ("--batch-tokens 128", "--batch-tokens 128 must be above --slots 128"),
        ("--workers 0", "--workers must be from 1"),
        ("--think -1", "--think must be from 0"),
        ("--trace burstgpt --arrivals trace", "has no arrival times"),
        ("--requests 4000", "has 3993 usable requests, not 4000"),
        ("--trace /nonexistent.csv", "/nonexistent.csv: No such file"),
    ],
)
def test_options_that_cannot_be_used(
    evenstep: Callable[..., tuple[int, str, str]], flags: str, problem: str
) -> None:
    code, _, err = evenstep("simulate", "serving", *flags.split())
    assert code == 2
    assert problem in " ".join(err.split())


def test_what_decides_a_result_is_described() -> None:
    told = config([(0.0, 10, 2, ())])
    assert replace(told, starvation_s=1.0).described() != told.described()
    assert (told.described()["lookahead"], told.described()["overcommit"]) == ("auto", None)


def test_the_router_learns_what_steps_cost() -> None:
    """Nearly every step has a full chunk on some rank, which at first could be part of C."""
    cost = StepTime(5e-3, 9.5e-8, per_prompt_token_s=5e-5)
    witness = Witness("barrier_time")
    simulate_serving(
        ServingConfig(
            policy="barrier_time",
            trace=load_trace("mooncake-synthetic"),
            arrivals=Arrivals("poisson", 7.0),
            requests=900,
            step_time=cost,
            dispatch=Dispatch.INSTANT,
            seed=1,
        ),
        policy=witness,
    )
    learned = witness.seen[-1][2].step_time
    assert learned is not None
    assert learned.per_prompt_token_s == pytest.approx(cost.per_prompt_token_s, rel=0.02)
    assert learned.per_token_s == pytest.approx(cost.per_token_s, rel=0.05)


@pytest.mark.timeout(900)  # four long simulations; a minute on a core of its own
def test_the_router_bounds_prompts_by_what_steps_cost_and_by_targets() -> None:
    given: dict[str, Any] = {
        "policy": "barrier_time",
        "trace": load_trace("mooncake-synthetic"),
        "arrivals": Arrivals("poisson", 7.0),
        "requests": 900,
        "step_time": StepTime(5e-3, 9.5e-8, per_prompt_token_s=5e-5),
        "dispatch": Dispatch.INSTANT,
        "seed": 1,
        "warmup": 0.5,  # teaches what steps cost
    }
    plain, free, bounded, both = (
        simulate_serving(ServingConfig(**given | more), keep_records=True)
        for more in (
            {},
            {"prompt_budget": AUTO},
            {"prompt_budget": AUTO, "targets": Targets(tpot_s=0.04)},
            {"prompt_budget": AUTO, "targets": Targets(1.0, 0.04)},
        )
    )
    tpot_s = [run.tpot_mean_s or 0.0 for run in (both, free, plain)]
    assert sorted(tpot_s) == tpot_s
    assert tpot_s[0] <= 0.04
    assert free.ttft_mean_s < 1.05 * plain.ttft_mean_s
    assert bounded.records is not None
    assert (bounded.records.seconds <= 0.041).mean() > 0.9, "as far as the cost is known"


KEYS = (
    "completed ttft_mean_s ttft_p50_s ttft_p90_s ttft_p99_s latency_mean_s tpot_mean_s tpot_p99_s "
    "throughput_tok_s goodput_per_s met_by_class misses prefix_hit_share idle_share step_mean_s "
    "evictions_per_1k parameters"
)


def test_the_help_tells_the_trace_that_is_taken_without_one(
    evenstep: Callable[..., tuple[int, str, str]],
) -> None:
    taken = ServingOptions().config().trace.name
    (name,) = (name for name, path in BUNDLED.items() if path.name == taken)
    _, out, _ = evenstep("simulate", "serving", "--help")
    assert f"[{name}]" in "".join(out.split())


def test_the_command(evenstep: Callable[..., tuple[int, str, str]]) -> None:
    flags = "--policy barrier_time --dispatch instant --requests 60 --prompt-budget 1024"
    flags += " --beside 4:.5"
    code, out, err = evenstep("simulate", "serving", *flags.split(), "--json", "-")
    assert code == 0, err
    report = json.loads(out)
    assert " ".join(report) == KEYS
    used = report["parameters"]
    assert (report["completed"], used["policy"], used["prompt_budget"]) == (
        60,
        "barrier_time",
        1024,
    )
    assert "TTFT p99, s" in err
    assert "instant dispatch" in err
    assert "8 workers and groups of 4:0.5 beside them, of 128 slots" in " ".join(err.split())


def test_the_command_says_by_which_targets_prompts_are_bounded(
    evenstep: Callable[..., tuple[int, str, str]],
) -> None:
    flags = "--policy barrier_time --requests 60 --prompt-budget auto"
    _, plain, _ = evenstep("simulate", "serving", *flags.split())
    assert "prompts' by the router's budget; pool dispatch" in " ".join(plain.split())
    code, out, err = evenstep(
        "simulate", "serving", *flags.split(), "--target-ttft", "1", "--target-tpot", "0.04"
    )
    assert code == 0
    told = " ".join((out + err).split())
    assert "prompts' by the router's budget for TTFT 1 s and TPOT 0.04 s; pool" in told
    _, windows, _ = evenstep("simulate", "serving", *flags.split(), "--prefill-window", "1/4")
    assert "router's budget, prompts in 1/4 of the steps; pool" in " ".join(windows.split())
