"""A tier is a sequence of requests with columns."""

from router.core.queue.tier import Tier
from tests.support.core import request

WAITING = [request(0, 30), request(1, 10, slots=3), request(2, 20)]


def test_a_tier_reads_like_its_requests() -> None:
    tier = Tier.of(WAITING)
    assert (len(tier), list(tier), tier[1], tier[:2]) == (3, WAITING, WAITING[1], WAITING[:2])
    assert tier.prompt_tokens.tolist() == [30, 10, 20]
    assert tier.slots.tolist() == [1, 3, 1]


def test_a_tier_of_a_tier_is_the_same_one() -> None:
    tier = Tier.of(WAITING)
    assert Tier.of(tier) is tier
