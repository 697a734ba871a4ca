import json
from typing import Any

import numpy as np
import pytest

from router.core.errors import InputError
from router.core.policies.bfio.instances import from_json, to_json
from router.core.policies.bfio.solver import UNLIMITED, Instance

Data = dict[str, Any]


def plain(**changes: Any) -> Data:
    return {
        "loads": [[800, 801], [640, 0]],
        "candidates": [200, [90, 95]],
        "growth": 1,
        "capacity": [1, 2],
        "weights": [1, 0.8],
    } | changes


def without(key: str) -> Data:
    return {name: value for name, value in plain().items() if name != key}


def test_what_a_person_wrote() -> None:
    read = from_json(plain())
    assert read.loads.tolist() == [[800, 801], [640, 0]]
    assert read.candidates.tolist() == [[200, 201], [90, 95]]
    assert read.capacity.tolist() == [1, 2]
    assert read.weights.tolist() == [1, 0.8]
    assert read.tie_weight == 0


def test_a_discount_instead_of_weights() -> None:
    read = from_json(without("weights") | {"discount": 0.5})
    assert read.weights.tolist() == [1, 0.5]


def test_memory_there_and_back() -> None:
    memory = {"room": [900, None], "need": [210, 100], "idle": [1]}
    read = from_json(plain(**memory))
    assert read.memory is not None
    assert read.memory.room.tolist() == [900, UNLIMITED]
    assert read.memory.need.tolist() == [210, 100]
    assert read.memory.idle.tolist() == [False, True]
    assert to_json(read).items() >= memory.items()
    assert "room" not in to_json(from_json(plain()))


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"need": [1]}, "need should have 2 entries, and has 1"),
        ({"room": [1]}, "room should have 2 entries, and has 1"),
        ({"room": [1, -1]}, r"Expected `int` >= 0 - at `\$\.room\[1\]`"),
        ({"need": [1.5, 1]}, r"Expected `int`, got `float` - at `\$\.need\[0\]`"),
        ({"idle": [2]}, "idle should list workers by number from 0 to 1"),
        ({"idle": 0}, r"Expected `array`, got `int` - at `\$\.idle`"),
    ],
)
def test_memory_that_makes_no_sense(memory: Data, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_json(plain(**{"room": [1, 1], "need": [1, 1]} | memory))


def same(one: Instance, other: Instance) -> bool:
    arrays = ("loads", "candidates", "capacity", "weights")
    return one.tie_weight == other.tie_weight and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        for name in arrays
    )


@pytest.mark.parametrize("growth", [0.0, 1.0, 0.1])
def test_there_and_back_every_bit_is_kept(growth: float) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(1, 99, (7, 1)) + growth * np.arange(5)
    rows[3] = rng.random(5)
    instance = Instance(rng.random((3, 5)), rows, np.array([-1, 0, 4]), 0.8 ** np.arange(5.0), 1e-3)
    written = to_json(instance)
    assert same(from_json(json.loads(json.dumps(written))), instance)
    assert sum(isinstance(candidate, list) for candidate in written["candidates"]) == 1


def test_a_single_step_and_no_candidates() -> None:
    present = Instance(np.ones((2, 1)), np.full((3, 1), 7.0), np.array([1, 1]), np.ones(1), 0.1)
    assert same(from_json(to_json(present)), present)
    assert to_json(present)["candidates"] == [7, 7, 7]
    empty = Instance(np.ones((2, 3)), np.empty((0, 3)), np.array([1, 1]), np.ones(3), 0.0)
    assert same(from_json(to_json(empty)), empty)


def test_whole_numbers_are_written_without_a_point() -> None:
    assert json.dumps(to_json(from_json(plain()))["loads"]) == "[[800, 801], [640, 0]]"


def test_other_keys_are_ignored() -> None:
    assert same(from_json(plain(exact={"objective": 3})), from_json(plain()))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1, 2], "not an instance: Expected `object`, got `array`"),
        (plain(format="csv"), "at `$.format`"),
        (plain(version=2), "at `$.version`"),
        (without("loads"), "required field `loads`"),
        (without("candidates"), "required field `candidates`"),
        (without("capacity"), "required field `capacity`"),
        (without("weights"), "give either weights, one for each step, or a discount"),
        (plain(discount=1), "give either weights, one for each step, or a discount"),
        (plain(weights=None), "got `null` - at `$.weights`"),
        (plain(loads=3), "Expected `array`, got `int` - at `$.loads`"),
        (plain(loads=[]), "Expected `array` of length >= 1 - at `$.loads`"),
        (plain(loads=[[], []]), "Expected `array` of length >= 1 - at `$.loads[0]`"),
        (plain(loads=[1, 2]), "Expected `array`, got `int` - at `$.loads[0]`"),
        (plain(loads=[[1, 2], [3]]), "loads[1] should have 2 entries, and has 1"),
        (plain(loads=[[1, 2], 3]), "Expected `array`, got `int` - at `$.loads[1]`"),
        (plain(loads=[[1, 2], [3, "x"]]), "got `str` - at `$.loads[1][1]`"),
        (plain(loads=[[1, 2], [3, None]]), "got `null` - at `$.loads[1][1]`"),
        (plain(candidates=[[1, 2, 3]]), "candidates[0] should have 2 entries, and has 3"),
        (plain(candidates=[1, float("nan")]), "at `$.candidates[1]`"),
        (plain(candidates=[1, True]), "got `bool` - at `$.candidates[1]`"),
        (plain(candidates=[10**400]), "out of range - at `$.candidates[0]`"),
        (plain(candidates=[1e308, 2]), "at `$.candidates[0]`"),
        (plain(loads=[[1, 2], [3, -1e13]]), "at `$.loads[1][1]`"),
        (without("weights") | {"discount": 1e200}, "at `$.discount`"),
        (
            without("weights")
            | {"discount": 1e5, "loads": [[1] * 5], "candidates": [], "capacity": [1]},
            "discount 100000: the weight of a step exceeds 1e+12",
        ),
        (plain(growth="fast"), "got `str` - at `$.growth`"),
        (plain(capacity=[1]), "capacity should have 2 entries, and has 1"),
        (plain(capacity=[1, 1.5]), "got `float` - at `$.capacity[1]`"),
        (plain(capacity=[True, 1]), "got `bool` - at `$.capacity[0]`"),
        (plain(capacity=[1, 2**70]), "at `$.capacity[1]`"),
        (plain(weights=[1]), "weights should have 2 entries, and has 1"),
        (plain(weights=[1, -1]), "at `$.weights[1]`"),
        (without("weights") | {"discount": -0.5}, "at `$.discount`"),
        (plain(tie_weight=-1), "at `$.tie_weight`"),
        (plain(tie_weight=float("inf")), "at `$.tie_weight`"),
    ],
)
def test_broken_ones_are_told_apart(data: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        from_json(data)
    assert message in str(caught.value)
