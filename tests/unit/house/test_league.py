"""The league's requests, its parts and their figures."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from loadgen.emulator.prompt_content import Content, whole_tokens
from loadgen.replay.replay_results import RequestResult
from loadgen.traces.trace import load_trace
from tests.bench.league import client
from tests.bench.league.bounds import least_ttft_ms
from tests.bench.league.client import Client, Headers, Place, Sending, Sent, figures
from tests.bench.league.entrant import Engines, Entrant, Running
from tests.bench.league.entrants import ENTRANTS, ONCE, ONCE_IN
from tests.bench.league.parts import is_due, kept_parts
from tests.bench.league.run import _due, parts_of
from tests.bench.league.workloads import KEYS, WORKLOADS, Ask, Workload, chains, piece, text_of
from tests.support.league_parts import kept

OPEN = WORKLOADS["open-80"]
NAMES = [pytest.param(workload, id=name) for name, workload in WORKLOADS.items()]
never = cast("Callable[[Engines, Path], AbstractContextManager[Running]]", None)


def entrant(name: str, flags: str = "", **cannot: str) -> Entrant:
    return Entrant(name, name, flags, "chooses", never, cannot)


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", NAMES)
def test_requests_are_those_of_their_seed(workload: Workload) -> None:
    assert workload.fingerprint(1) == workload.fingerprint(1) != workload.fingerprint(2)
    sessions = workload.sessions(1)
    asks = [ask for session in sessions for ask in session]
    assert len(asks) > 50
    assert {ask.tenant for ask in asks} <= KEYS.keys()
    assert all(ask.output_tokens >= 1 and ask.prompt and ask.wait_s >= 0 for ask in asks)
    # The emulator counts four characters as a token; none is cut in two.
    assert all(len(ask.prompt) % 4 == 0 for ask in asks)


def test_texts_share_as_many_blocks_as_the_trace_says() -> None:
    shared_somewhere = False
    for chain in chains()[:20]:
        for one, other in pairwise(chain):
            same = 0
            for a, b in zip(one.blocks, other.blocks, strict=False):
                if a != b:
                    break
                same += 1
            whole = min(one.prompt_tokens, other.prompt_tokens) // one.block_tokens
            texts = [Content(whole_tokens(text_of(each))).chain(512, "") for each in (one, other)]
            equal = sum(a == b for a, b in zip(*texts, strict=False))
            assert equal == min(same, whole)
            shared_somewhere = shared_somewhere or equal > 0
    assert shared_somewhere


def test_texts_have_the_lengths_of_the_trace() -> None:
    for request in load_trace("mooncake-synthetic").requests[:50]:
        assert len(text_of(request)) == 4 * request.prompt_tokens


def test_texts_of_two_keys_differ_at_once() -> None:
    beginnings = {piece(key, 2) for key in range(5000)}
    assert len(beginnings) == 5000


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_prompts_of_a_session_begin_alike_and_of_others_do_not(name: str) -> None:
    sessions = WORKLOADS[name].sessions(3)
    assert all(len(session) >= 3 for session in sessions)
    firsts = [session[0].prompt for session in sessions]
    beginning = 4 * (512 if name == "chat" else 8000)
    for session in sessions:
        assert {ask.prompt[:2048] for ask in session} == {session[0].prompt[:2048]}
    assert len({prompt[:beginning] for prompt in firsts}) == (len(firsts) if name == "chat" else 1)


def test_lengths_are_not_told_to_routers_by_more_than_the_hidden_field() -> None:
    ask = OPEN.sessions(0)[0][0]
    body = Client(OPEN, Place("http://x", (), "", "m"))._body(ask)
    without = body.replace(b'"vllm_xargs":{"evenstep_output_tokens":%d}' % ask.output_tokens, b"")
    assert without != body
    assert b":%d" % ask.output_tokens not in without


# --- parts ----------------------------------------------------------------------------------------


def test_a_kept_part_is_not_measured_again(tmp_path: Path) -> None:
    assert is_due(entrant("a"), OPEN, 0, kept_parts(OPEN.name, tmp_path))
    kept(tmp_path, OPEN, "a", 0)
    found = kept_parts(OPEN.name, tmp_path)
    assert not is_due(entrant("a"), OPEN, 0, found)
    assert is_due(entrant("a"), OPEN, 1, found)
    assert is_due(entrant("b"), OPEN, 0, found)


@pytest.mark.parametrize(
    "changed",
    [{"flags": "--other"}, {"packages": ["b==2"]}, {"requests_are": "others"}],
)
def test_a_part_of_something_else_is_measured_again(
    tmp_path: Path, changed: Mapping[str, object]
) -> None:
    kept(tmp_path, OPEN, "a", 0, **changed)
    assert is_due(entrant("a"), OPEN, 0, kept_parts(OPEN.name, tmp_path))


def test_a_part_of_a_busy_machine_comes_after_all_that_is_missing(tmp_path: Path) -> None:
    kept(tmp_path, OPEN, "a", 0, busy=True)
    due = [
        (each.name, seed)
        for each, _, seed in _due([*parts_of([entrant("a")], [OPEN], 3)], tmp_path)
    ]
    assert due == [("a", 1), ("a", 2), ("a", 0)]


def test_a_stale_part_is_measured_again(tmp_path: Path) -> None:
    kept(tmp_path, OPEN, "a", 0)
    found = kept_parts(OPEN.name, tmp_path)
    found["a, seed 0"]["origin"]["code"] = {"tests/bench/league/entrant.py": "another"}
    assert is_due(entrant("a"), OPEN, 0, found)


def test_entrants_alternate_and_are_left_out_by_workload() -> None:
    both = entrant("a"), entrant("b", chat="cannot")
    order = [
        (each.name, load.name, seed)
        for each, load, seed in parts_of(both, (OPEN, WORKLOADS["chat"]), 2)
    ]
    assert order == [
        *(("a", "open-80", 0), ("b", "open-80", 0), ("a", "chat", 0)),
        *(("b", "open-80", 1), ("a", "open-80", 1), ("a", "chat", 1)),
    ]


def test_further_rules_run_with_one_seed_in_few_workloads_unless_they_are_named() -> None:
    rule, loads = ENTRANTS["smg prefix_hash"], (WORKLOADS["chat"], WORKLOADS["agents"])
    assert rule.name in ONCE
    assert [(load.name, seed) for _, load, seed in parts_of([rule], loads, 3)] == [("chat", 0)]
    assert len([*parts_of([rule], loads, 3, once=())]) == 6


def test_rules_that_run_once_are_entrants_and_their_workloads_exist() -> None:
    assert ENTRANTS.keys() >= ONCE
    # Sticky sessions of other products stand beside evenstep's everywhere.
    assert ENTRANTS.keys() - ONCE >= {"smg manual", "sglang-router manual"}
    assert set(ONCE_IN) <= WORKLOADS.keys()


# --- figures --------------------------------------------------------------------------------------


def test_figures_of_a_run_without_answers() -> None:
    sendings = [Sending(number, "one", 1.0, 1.0) for number in range(10)]
    found = figures(OPEN, Sent(sendings, [None] * 10), [], [0, 0, 0])
    assert (found["lost"], found["failed"], found["completed"]) == (8, 8, 0)  # less the warm-up
    assert found["mean_ttft_ms"] is None


def test_no_router_can_be_better_than_prompts_alone_with_all_beginnings_cached() -> None:
    shared, own = piece(1, 1600), piece(2, 3000)
    sessions = [[Ask(shared, 1), Ask(shared + own, 1, 5.0)], [Ask(shared + own[:64], 1, 9.0)]]
    load = replace(OPEN, sessions=lambda _: sessions, warmup=0.0)  # 5 ms and 50 us a token
    first, second, third = 5 + 1600 * 0.05, 2 * 5 + 3000 * 0.05, 5 + 1 * 0.05
    assert least_ttft_ms(load, 0) == pytest.approx((first + second + third) / 3)
    # The second session's only request comes after all of the first one's.
    assert least_ttft_ms(replace(load, warmup=0.5), 0) == pytest.approx(third)
    assert least_ttft_ms(WORKLOADS["decode-saturated"], 0) is None


def answered(workload: Workload, *times: tuple[int, float, float]) -> Mapping[str, Any]:
    """Figures of requests by session, time of sending and of their end; TTFT is 0.5 s."""
    results = [
        RequestResult(
            prompt_tokens=10,
            output_tokens=11,
            cached_tokens=0,
            scheduled_s=sent_s,
            sent_s=sent_s,
            first_s=sent_s + 0.5,
            end_s=end_s,
        )
        for _, sent_s, end_s in times
    ]
    sendings = [Sending(session, "one", sent_s, sent_s) for session, sent_s, _ in times]
    sent = Sent(sendings, [*results], max(end_s for *_, end_s in times))
    return figures(replace(workload, time_scale=1.0), sent, [], [0, 0, 0])


def test_of_clients_that_wait_requests_count_by_their_end() -> None:
    load = replace(WORKLOADS["decode-saturated"], warmup=0.5)
    # The first one lay until the middle, the last one ends after all were sent.
    times = (0, 0, 6), (1, 0, 1), (2, 2, 5), (3, 5, 9)
    found = answered(load, *times, (4, 7, 9))
    assert found["completed"] == 2
    assert found["mean_e2el_ms"] == pytest.approx(1e3 * (6 + 3) / 2)
    of_times = answered(replace(load, clients=0), *times)
    assert of_times["mean_e2el_ms"] == pytest.approx(1e3 * (3 + 4) / 2)


def test_the_first_sessions_warm_a_router_up_however_late_their_requests_come() -> None:
    load = replace(WORKLOADS["chat"], warmup=1 / 3, targets_ms={"e2el": 2500.0})
    fast = (0, 0, 1), (0, 2, 3), (1, 4, 5), (2, 4, 6), (1, 6, 7)
    slow = (0, 0, 8), (1, 4, 5), (2, 4, 6), (1, 6, 7), (0, 9, 18)
    for times in (fast, slow):
        found = answered(load, *times)
        assert (found["completed"], found["requests"]) == (3, 5)
        assert found["mean_e2el_ms"] == pytest.approx(1e3 * (1 + 2 + 1) / 3)
        # In the 2 s in which they are sent: 11 tokens, a first one and all within 1.5 s.
        assert found["tokens_per_s"] == pytest.approx((11 + 11) / 2)
        assert found["goodput_per_s"] == pytest.approx(3 / 2)
        assert found["good_share"] == 1.0


def test_single_requests_count_by_their_order_with_all_tokens_of_their_time() -> None:
    load = replace(OPEN, warmup=0.5, targets_ms={"e2el": 1e6})
    found = answered(load, (0, 0, 8.5), (1, 1, 8.5), (2, 4, 5), (3, 8, 10))
    assert found["completed"] == 2
    assert found["mean_e2el_ms"] == pytest.approx(1e3 * (1 + 2) / 2)
    within = 10 * 4 / 8 + 10 * 4 / 7  # of the warm-up's answers
    assert found["tokens_per_s"] == pytest.approx((within + 11) / 4)


@pytest.mark.parametrize("workload", NAMES)
def test_the_warm_up_is_of_whole_sessions_and_bursts(workload: Workload) -> None:
    sessions = workload.sessions(0)
    starts = [session[0].wait_s for session in sessions]
    assert starts == sorted(starts)
    warm = workload.warm(len(sessions))
    assert 0 < warm <= len(sessions) / 3
    if workload.name == "agents":
        assert starts[warm - 1] < starts[warm]
        assert len(set(starts[:warm])) == 4


def test_only_requests_of_a_session_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[bytes, bytes]] = []

    async def receive(_: object, url: str, headers: Headers, *__: object) -> tuple[int, None]:
        seen.append(dict(headers))
        return 200, None

    monkeypatch.setattr(client, "receive", receive)
    alone, turns = [Ask("the ", 1, tenant="flood")], [Ask("and ", 1), Ask("and for ", 1)]
    sent = asyncio.run(Client(OPEN, Place("http://x", (), "", "m")).run([alone, turns], 60.0))
    assert [each.session for each in sent.sendings] == [0, 1, 1]
    session = {b"x-session-id", b"x-smg-routing-key"}
    single, one, other = sorted(seen, key=lambda headers: headers[b"x-request-id"])
    assert one.keys() == other.keys() == single.keys() | session
    assert not session & single.keys()
    assert {each[name] for each in (one, other) for name in session} == {b"session-1"}
    assert single[b"x-llm-d-inference-fairness-id"] == b"flood"
