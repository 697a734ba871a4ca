"""The router before two real engines: one computes prompts, the other finds their KV and decodes.

Answers are compared with those of the decode engine alone, which has to compute the prompt itself.
"""

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.core import token
from tests.support.disaggregated import (
    CHAT,
    COMPLETIONS,
    SLOTS,
    WAIT_S,
    Pair,
    ask,
    found,
    freeze,
    held,
    hits,
    kill,
    letters,
    prompt_tokens,
    rows,
    wait_idle,
)
from tests.support.engine import MODEL, READY_S, Installation, metric, requests_running
from tests.support.server import Server, running_router, wait_ready, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

# Running whenever a test looks, unless it is given up.
ENDLESS: dict[str, Any] = {"max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        pair = Pair(engine_installation, tmp_path_factory.mktemp("pair"), stack)
        for server in (pair.prefill, pair.decode):
            wait_ready(server, 2 * READY_S)
        yield pair


@pytest.fixture(scope="module")
def router(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--worker", f"{pair.prefill.url},role=prefill,slots={SLOTS}"]
    flags += ["--worker", f"{pair.decode.url},role=decode,snapshots={pair.endpoint}"]
    flags += ["--kv-transfer", "content", "--health-interval", "0.2", "--health-timeout", "30"]
    with running_router(tmp_path_factory.mktemp("router"), *flags) as server:
        wait_until(lambda: ups(server) == (True, True), WAIT_S, "both engines are up")
        yield server


def groups(router: Server) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the router tells of the prefill workers, and of those that decode."""
    told = router.get("/health").json()["groups"]
    return told["default/prefill"], told["default"]


def ups(router: Server) -> tuple[bool, ...]:
    return tuple(group["workers"][0]["up"] for group in groups(router))


def in_flight(router: Server) -> tuple[int, ...]:
    """Requests that are computed at a prefill worker, and at one that decodes."""
    return tuple(group["workers"][0]["in_flight"] for group in groups(router))


def wait_clean(router: Server, *engines: Server) -> None:
    """Nothing is left of any request: not in the engines that live, nor in what the router says."""

    def clean() -> bool:
        return not any([*in_flight(router), *(group["pool_requests"] for group in groups(router))])

    wait_until(clean, WAIT_S, "the router drops all requests")
    wait_idle(*engines)
    for name in ("worker_in_flight", "worker_load_tokens", "pool_requests", "kv_kept_tokens"):
        assert metric(router, f"evenstep_{name}") == 0, name


# --- what the router relies on ------------------------------------------------------------------


def test_a_prompt_computed_by_one_engine_is_found_by_the_other(pair: Pair) -> None:
    """Its whole blocks are; both vLLM's count and the state stream tell how many tokens."""
    with rows(pair.endpoint) as first:
        for number, length in enumerate((3, 33, 34, 64, 65, 66, 96, 100, 1000)):
            body = {"prompt": letters(length), "logprobs": 1}
            ask(pair.prefill, COMPLETIONS, {**body, "max_tokens": 1})
            before = hits(pair.decode)
            answer = ask(pair.decode, COMPLETIONS, body, token(number))
            row = first(token(number))
            assert hits(pair.decode) - before == row.cached_tokens == found(length)
            assert (row.prompt_tokens, row.generated_tokens, row.prefill_left) == (length, 1, 0)
            assert_alike(answer, pair.alone(COMPLETIONS, body))


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same texts and counts; probabilities but for what another batch makes of them."""
    assert ours["usage"] == theirs["usage"]
    assert ours["choices"].keys() == theirs["choices"].keys()
    for index, (text, logprobs, finish) in ours["choices"].items():
        other_text, other_logprobs, other_finish = theirs["choices"][index]
        assert (text, finish) == (other_text, other_finish)
        assert logprobs == pytest.approx(other_logprobs, abs=0.05)


# --- answers through the router -----------------------------------------------------------------


def text(length: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": letters(length), **more}


def chat(length: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": letters(length)}], **more}


STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
SEVERAL: dict[str, Any] = {"n": 2, "temperature": 0.7, "seed": 7}
SPLIT = [
    *(text(length) for length in (34, 63, 64, 66, 100, 128, 250, 1000, 2000)),
    *(text(length, **STREAM) for length in (40, 95, 500)),
    text(70, logprobs=2),
    text(75, logprobs=2, **STREAM),
    text(80, **SEVERAL),
    text(85, **SEVERAL, **STREAM),
    text(90, min_tokens=8, stop=["e"]),
    (COMPLETIONS, {"prompt": [9, *range(20, 90)]}),
    *(chat(length) for length in (50, 120, 300)),
    chat(75, **STREAM),
    chat(80, logprobs=True, top_logprobs=2, max_completion_tokens=12),
    chat(85, logprobs=True, **SEVERAL, **STREAM),
    chat(90, response_format={"type": "json_object"}),
]


@pytest.mark.parametrize(("path", "body"), SPLIT)
def test_a_request_is_split(pair: Pair, router: Server, path: str, body: dict[str, Any]) -> None:
    given, before = prompt_tokens(pair.prefill), hits(pair.decode)

    answer = ask(router, path, body)

    length = answer["usage"]["prompt_tokens"]
    assert prompt_tokens(pair.prefill) - given == length
    assert hits(pair.decode) - before == body.get("n", 1) * found(length) > 0
    assert_alike(answer, pair.alone(path, body))
    wait_clean(router, pair.prefill, pair.decode)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        text(70, echo=True),
        text(75, echo=True, logprobs=1),
        text(80, prompt_logprobs=0),
        chat(85, prompt_logprobs=1),
        (COMPLETIONS, {"prompt": [letters(70), letters(80)]}),
        (COMPLETIONS, {"prompt": [[*range(20, 90)], [*range(30, 100)]], **STREAM}),
    ],
)
def test_what_cannot_be_split_is_decoded_whole(
    pair: Pair, router: Server, path: str, body: dict[str, Any]
) -> None:
    given, before = prompt_tokens(pair.prefill), hits(pair.decode)

    answer = ask(router, path, body)

    assert (prompt_tokens(pair.prefill), hits(pair.decode)) == (given, before)
    assert_alike(answer, pair.alone(path, body))


def test_no_size_was_estimated_where_a_prompt_was_counted(router: Server) -> None:
    before = metric(router, "evenstep_requests_estimated_total")
    ask(router, *text(100))
    # Once: when it was given to the prefill worker.
    assert metric(router, "evenstep_requests_estimated_total") - before == 1


# --- clients that leave -------------------------------------------------------------------------


@contextlib.contextmanager
def leaving(router: Server, prompt: str) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun, and that is given up at the end of the block."""
    asked = {"model": MODEL, "prompt": prompt, "stream": True, **ENDLESS}
    url = router.url + COMPLETIONS
    with httpx.stream("POST", url, json=asked, timeout=WAIT_S) as told:
        lines = told.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def leave_unanswered(router: Server, seen: Callable[[], bool], **body: Any) -> None:
    """Ask, and hang up as soon as ``seen``."""
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=WAIT_S)
    asked = json.dumps({"model": MODEL, **body})
    connection.request("POST", COMPLETIONS, asked, {"content-type": "application/json"})
    wait_until(seen, WAIT_S, "the request has come so far")
    connection.close()


def test_leaving_while_the_prompt_is_computed(pair: Pair, router: Server) -> None:
    given = prompt_tokens(pair.decode)

    # In chunks, over seconds.
    long = letters(32_000)
    leave_unanswered(router, lambda: requests_running(pair.prefill) == 1, prompt=long)

    wait_clean(router, pair.prefill, pair.decode)
    assert prompt_tokens(pair.decode) == given


def test_leaving_a_stream(pair: Pair, router: Server) -> None:
    with leaving(router, letters(100)):
        wait_until(lambda: requests_running(pair.decode) == 1, WAIT_S, "it is decoded")
        assert in_flight(router) == (0, 1)
        assert not held(pair.prefill)

    wait_clean(router, pair.prefill, pair.decode)


def test_leaving_between_the_two(pair: Pair, router: Server) -> None:
    """Its prompt is computed, and no worker has a slot to decode it."""
    with contextlib.ExitStack() as stack:
        for _ in range(SLOTS):
            stack.enter_context(leaving(router, letters(50)))
        given = prompt_tokens(pair.prefill)

        def ready() -> bool:
            return bool(groups(router)[1]["pool_requests"] == 1)

        leave_unanswered(router, ready, prompt=letters(100))

        wait_until(lambda: not ready(), WAIT_S, "it does not wait any more")
        assert in_flight(router) == (0, SLOTS)
        # Engines count after a step what they have sent during it.
        wait_until(lambda: prompt_tokens(pair.prefill) == given + 100, WAIT_S, "it is counted")
        wait_until(lambda: requests_running(pair.decode) == SLOTS, WAIT_S, "the others run")
    wait_clean(router, pair.prefill, pair.decode)


# --- engines that die: the last tests, the decode engine is gone after them ---------------------


def test_a_prefill_engine_that_dies_costs_no_answer(pair: Pair, router: Server) -> None:
    before, fallbacks = hits(pair.decode), metric(router, "evenstep_prefill_fallbacks_total")
    asked = [text(60 + 5 * number, stream=number % 2 == 1) for number in range(SLOTS)]
    freeze(pair.prefill)
    with ThreadPoolExecutor(SLOTS) as pool:
        answers = [pool.submit(ask, router, *one) for one in asked]
        wait_until(lambda: in_flight(router) == (SLOTS, 0), WAIT_S, "all are at the first engine")

        kill(pair.prefill)

        told = [answer.result(timeout=2 * WAIT_S) for answer in answers]
    assert all(one["choices"][0][2] for one in told)
    assert hits(pair.decode) == before
    assert metric(router, "evenstep_prefill_fallbacks_total") - fallbacks == SLOTS
    wait_clean(router, pair.decode)


def test_without_prefill_workers_those_that_decode_do_all(pair: Pair, router: Server) -> None:
    assert groups(router)[1]["prompts"] == "here: default/prefill is down"
    for one in (text(100), chat(100, **STREAM)):
        assert_alike(ask(router, *one), pair.alone(*one))
    assert router.get("/health").status_code == 200
    wait_clean(router, pair.decode)


def test_a_prefill_engine_that_comes_back_is_used_again(pair: Pair, router: Server) -> None:
    wait_ready(pair.start_prefill(), 2 * READY_S)
    wait_until(lambda: ups(router) == (True, True), WAIT_S, "the router sees it")
    before = hits(pair.decode)
    ask(router, *text(100))
    assert hits(pair.decode) - before == found(100)


def test_a_decode_engine_that_dies_leaves_nothing_behind(pair: Pair, router: Server) -> None:
    asked = {"model": MODEL, "prompt": letters(100)}
    with ThreadPoolExecutor(1) as pool, leaving(router, letters(70)) as events:
        freeze(pair.decode)
        unanswered = pool.submit(
            httpx.post, router.url + COMPLETIONS, json=asked, timeout=2 * WAIT_S
        )
        wait_until(lambda: in_flight(router) == (0, 2), WAIT_S, "its prompt is computed")

        kill(pair.decode)

        lines = [line for line in events if line]
        answer = unanswered.result(timeout=2 * WAIT_S)
    assert "error" in json.loads(lines[-1].removeprefix("data: "))
    assert answer.status_code == 503
    assert router.get("/health").status_code == 503
    wait_clean(router, pair.prefill)
