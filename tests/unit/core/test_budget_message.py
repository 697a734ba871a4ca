import msgspec
import pytest

from router.core.errors import SnapshotError
from router.core.wire import BudgetMessage, decode, decode_budget, encode

MESSAGE = BudgetMessage("router", "epoch", 17.5, 512, 20)


def test_a_budget_is_read_as_it_was_sent() -> None:
    assert decode_budget(encode(MESSAGE)) == MESSAGE


@pytest.mark.parametrize(
    "changed", [{"tokens": 0}, {"every": 0}, {"every": 256}, {"seen_s": -1.0}, {"version": 2}]
)
def test_what_is_no_budget_is_refused(changed: dict[str, float]) -> None:
    with pytest.raises(SnapshotError):
        decode_budget(encode(msgspec.structs.replace(MESSAGE, **changed)))


def test_a_budget_is_no_snapshot() -> None:
    with pytest.raises(SnapshotError):
        decode(encode(MESSAGE))
