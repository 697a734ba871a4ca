"""A block that is ended from outside by an error: who ends it, and what is left of that."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from router.core.errors import RecalledError, RequestTimeoutError
from router.proxy.attempts import Bound
from tests.support.scripted import soon

STRUCK, TIMED = RecalledError("struck"), RequestTimeoutError("timed")


async def struck(act: Callable[[asyncio.Task[None], Bound, Bound], None]) -> list[str]:
    """What two blocks, one in the other, raise when something is done to a task within them."""
    outer, inner = Bound(), Bound()
    raised: list[str] = []
    reached = asyncio.Event()

    async def work() -> None:
        try:
            with outer:
                try:
                    with inner:
                        reached.set()
                        await asyncio.Event().wait()
                except RecalledError as error:
                    raised.append(str(error))
        except RequestTimeoutError as error:
            raised.append(str(error))
        await asyncio.sleep(0)  # who is still to be cancelled is so here
        raised.append("went on")

    task = asyncio.create_task(work())
    await soon(reached.wait())
    act(task, outer, inner)
    with contextlib.suppress(asyncio.CancelledError):
        await soon(task)
    return raised


@pytest.mark.parametrize(
    ("act", "raised"),
    [
        pytest.param(lambda task, outer, inner: inner.strike(STRUCK), ["struck", "went on"]),
        pytest.param(lambda task, outer, inner: outer.strike(TIMED), ["timed", "went on"]),
        pytest.param(
            lambda task, outer, inner: (inner.strike(STRUCK), outer.strike(TIMED)),
            ["timed", "went on"],
        ),
        pytest.param(
            lambda task, outer, inner: (outer.strike(TIMED), inner.strike(STRUCK)),
            ["timed", "went on"],
        ),
        pytest.param(
            lambda task, outer, inner: (inner.strike(STRUCK), inner.strike(STRUCK)),
            ["struck", "went on"],
        ),
        pytest.param(lambda task, outer, inner: task.cancel(), []),
        pytest.param(lambda task, outer, inner: (task.cancel(), inner.strike(STRUCK)), []),
        pytest.param(lambda task, outer, inner: (outer.strike(TIMED), task.cancel()), []),
    ],
    ids=[
        *("the inner one", "the outer one", "both", "both, the outer first", "twice"),
        *("cancelled", "cancelled and struck", "struck and cancelled"),
    ],
)
async def test_who_is_struck(
    act: Callable[[asyncio.Task[None], Bound, Bound], None], raised: list[str]
) -> None:
    assert await struck(act) == raised


async def test_by_the_clock() -> None:
    bound = Bound()

    async def work() -> None:
        with bound:
            bound.within(0.0, TIMED)
            await asyncio.Event().wait()

    with pytest.raises(RequestTimeoutError, match="timed"):
        await soon(work())
    assert bound.error is TIMED


@pytest.mark.parametrize("timed", [False, True])
async def test_what_is_lifted_strikes_no_more(timed: bool) -> None:
    bound = Bound()
    with bound:
        if timed:
            bound.within(0.0, TIMED)
        bound.lift()
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert bound.error is None


async def test_what_the_block_makes_of_the_strike_goes_first() -> None:
    bound = Bound()

    async def work() -> None:
        with bound:
            asyncio.get_running_loop().call_soon(bound.strike, STRUCK)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise OSError("broken") from None

    with pytest.raises(OSError, match="broken"):
        await work()
    await asyncio.sleep(0)  # nothing is left to be cancelled
