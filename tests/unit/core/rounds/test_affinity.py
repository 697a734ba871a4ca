"""How much it matters which worker computes a prompt."""

import pytest

from router.core.rounds.affinity import Affinity
from router.core.types import Request
from tests.support.core import requests


def share(*hits: list[int], prompt: int = 100) -> float:
    """Of requests whose prompts are cached so, by worker."""
    affinity, told = Affinity(), iter(hits)
    for _ in hits:
        affinity.see(requests([prompt]), lambda _: next(told))
    return affinity.share


def test_nothing_is_known_at_first() -> None:
    affinity = Affinity()
    affinity.see(requests([100]), None)
    assert affinity.share == 0


def test_what_all_have_cached_does_not_count() -> None:
    assert share([40, 40, 40]) == 0
    assert share([40, 40, 100]) == pytest.approx(0.4)
    assert share([0, 80], [0, 0]) == pytest.approx(0.2, rel=0.01)


def test_long_prompts_count_for_more() -> None:
    def hits(one: Request) -> list[int]:
        return [0, 900 if one.prompt_tokens == 900 else 0]

    affinity = Affinity()
    affinity.see(requests([100, 900]), hits)
    assert affinity.share == pytest.approx(0.45, rel=0.01)


def test_it_forgets() -> None:
    many = [[0, 100]] * 3000
    assert share(*many) == pytest.approx(0.5)
    assert share(*many, *[[0, 0]] * 3000) < 0.05
