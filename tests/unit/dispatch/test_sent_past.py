"""Prompts that are sent past the prefill workers, or could have been."""

from dataclasses import replace

import pytest

from router.core.policies.baselines import PerRequest, fcfs
from router.core.prefix.ids import chain, seed
from router.core.types import Content
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.interface import Deciding
from tests.support.dispatching import dispatch_settings
from tests.unit.core.state.test_short_misses import ASKS, STAGE, split


def dispatcher() -> Dispatcher:
    make = lambda: PerRequest(fcfs)  # noqa: E731
    return Dispatcher(split(), Deciding(make, make), dispatch_settings(), lambda: 1.0)


def answers(port: Dispatcher) -> list[int]:
    return [len(group.prefixes._answers) for group in port.cluster.groups.values()]


async def test_a_short_miss_that_fails_has_no_kv_that_is_gone() -> None:
    port = dispatcher()
    sent = port.send_past(ASKS)
    assert sent is not None
    port.prefill_again(sent[0], sent[1].result().id)
    stats = {name: decider.stats for name, decider in port.deciders.items()}
    assert (stats[STAGE].passed, stats[STAGE].repeated_prefills) == (1, 0)
    assert stats["default"].returned == 1


@pytest.mark.parametrize("known", [True, False])
async def test_what_was_asked_of_caches_is_not_kept(known: bool) -> None:
    """Another prompt goes through a prefill worker, under another id later, or nowhere."""
    port = dispatcher()
    other = Content(pieces=chain(range(1000, 1160), seed()))
    asked = ASKS if known else replace(ASKS, content=other)
    assert (port.send_past(asked) is not None) == known
    assert answers(port) == [0, 0]
