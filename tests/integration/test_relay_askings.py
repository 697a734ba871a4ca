"""How often engines are asked, and answers that end in the midst or never."""

import contextlib
import json

import pytest

from router.core.types import Outcome
from tests.support.relaying import One, routed
from tests.support.scripted import DONE, SSE, ScriptedServer, head, soon, token_events, until
from tests.support.serving import Router

TOKENS = token_events(3)
UNFRAMED = head(200, SSE)


async def kept(router: Router, engines: list[ScriptedServer]) -> None:
    """Each engine has a connection that is open and has no request."""
    asked = [router.post() for _ in engines]
    for exchange in [await engine.next() for engine in engines]:
        await exchange.answer(b"{}")
    for answer in asked:
        assert (await soon(answer)).status_code == 200


@pytest.mark.parametrize("cut", ["close", "reset"])
async def test_each_asking_counts_also_on_a_kept_connection(cut: str) -> None:
    async with routed(3, slots=1, max_attempts=2) as (router, engines):
        await kept(router, engines)
        asked = router.post()
        for engine in engines[:2]:
            getattr(await engine.next(), cut)()

        answer = await soon(asked)

        assert answer.status_code == 502
        assert [engine.idle for engine in engines] == [True] * 3
        assert [engine.connections for engine in engines] == [1] * 3
        assert router.stats.returned == 1
        await router.settled()


@pytest.mark.parametrize("half", [b"", TOKENS[2][:9], TOKENS[2][:-1]])
async def test_a_stream_without_a_frame_that_ends_in_the_midst_is_no_answer(
    one: One, half: bytes
) -> None:
    router, engine = one
    asked = router.post(stream=True)
    exchange = await engine.next()
    await exchange.send(UNFRAMED, *TOKENS[:2], half)
    exchange.close()

    body = (await soon(asked)).content

    whole = b"".join(TOKENS[:2])
    assert body.startswith(whole + b'data: {"error"')
    assert body.count(b"\n\n") == 3
    error = json.loads(body.removeprefix(whole).removeprefix(b"data: "))["error"]
    assert "before its answer's last event" in error["message"]
    assert (router.outcomes, router.troubles) == ({Outcome.FAILED: 1}, ["a"])
    await router.settled()


async def test_a_stream_without_a_frame_that_comes_to_its_end_is_an_answer(one: One) -> None:
    router, engine = one
    asked = router.post(stream=True)
    exchange = await engine.next()
    await exchange.send(UNFRAMED, *TOKENS, DONE)
    exchange.close()

    assert (await soon(asked)).content == b"".join(TOKENS) + DONE
    assert (router.outcomes, router.troubles) == ({Outcome.COMPLETED: 1}, [])


async def test_an_event_without_an_end_ends_by_an_error(one: One) -> None:
    router, engine = one
    asked = router.post(stream=True)
    exchange = await engine.next()
    await exchange.start_stream()
    await exchange.chunks(TOKENS[0])
    await until(lambda: sum(router.stats.ttft_s.counts) == 1)
    piece = b"x" * (2 << 20)
    with contextlib.suppress(ConnectionError):
        for _ in range(64):
            await exchange.chunks(piece)

    answer = await soon(asked)

    assert answer.content.startswith(TOKENS[0] + b'data: {"error"')
    assert b"an event has more than 16,777,216 bytes" in answer.content
    await router.settled()
