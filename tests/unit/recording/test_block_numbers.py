"""Numbers of blocks: what prompts share, in order of first sight, and in bounded memory."""

from hypothesis import given
from hypothesis import strategies as st

from router.recording.block_numbers import BlockNumbers


def test_a_conversation_has_a_run_for_each_turn() -> None:
    numbers = BlockNumbers()
    system, other = [900, 7], [51, 3]
    assert numbers.runs([*system, 40]) == [0, 3]
    assert numbers.runs([*system, *other]) == [0, 2, 3, 2]
    assert numbers.runs([*system, 40, 88, 89]) == [0, 3, 5, 2]
    assert numbers.runs([*system, *other, 60]) == [0, 2, 3, 2, 7, 1]
    assert numbers.runs([]) == []


def test_ends_of_prompts_that_came_long_ago_are_forgotten_first() -> None:
    numbers = BlockNumbers(most=4)
    numbers.runs([10, 11, 12])
    numbers.runs([20, 21])
    assert numbers.runs([10, 11]) == [0, 2]
    assert numbers.runs([20, 21]) == [3, 2]
    assert numbers.runs([12]) == [5, 1], "a new number"


@given(st.lists(st.lists(st.integers(0, 20), unique=True), max_size=20))
def test_equal_ids_have_equal_numbers_and_others_have_others(prompts: list[list[int]]) -> None:
    numbers, known = BlockNumbers(), dict[int, int]()
    for ids in prompts:
        runs = numbers.runs(ids)
        told = [n for i in range(0, len(runs), 2) for n in range(runs[i], runs[i] + runs[i + 1])]
        for id_, number in zip(ids, told, strict=True):
            assert known.setdefault(id_, number) == number
    assert sorted(known.values()) == list(range(len(known)))
