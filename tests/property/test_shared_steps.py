"""Numbers of a group's steps, whoever restarts: the same step has one number, and numbers grow."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.core.state.shared_steps import SharedSteps
from router.core.types import Snapshot
from tests.support.core import snapshot

RANKS = 3
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["step"] * 8 + ["repeat", "rest", "restart one", "restart all", "retry"]),
        st.integers(0, RANKS - 1),
        st.integers(0, RANKS - 1),
    ),
    max_size=80,
)


@dataclass
class Group:
    """Ranks of a barrier; those of ``busy`` report their steps."""

    life: int = 0
    wave: int = 0
    step: int = 0
    epochs: list[int] = field(default_factory=lambda: [0] * RANKS)
    busy: set[int] = field(default_factory=lambda: set(range(RANKS)))

    def change(self, kind: str, rank: int) -> None:
        if kind == "rest" and self.step:
            self.wave, self.step = self.wave + 1, 0
        elif kind == "restart one":
            self.epochs[rank] += 1
        elif kind == "restart all":
            self.epochs = [epoch + 1 for epoch in self.epochs]
            self.life, self.wave, self.step = self.life + 1, 0, 0
        elif kind == "retry" and self.step:  # after a fault, in place
            self.life, self.step = self.life + 1, 0


def told(epoch: str, wave: int, step: int, own: int = 0) -> Snapshot:
    """``own``: the rank's count of its own steps."""
    made = snapshot("delta", 1, epoch=epoch, step=own or 1000 * wave + step)
    return replace(made, wave=wave, wave_step=step)


@given(EVENTS)
def test_a_step_has_one_number(events: list[tuple[str, int, int]]) -> None:
    group, steps = Group(), SharedSteps()
    numbers: dict[tuple[int, int, int], int] = {}
    last, reported = 0, set(range(RANKS))
    said_last: dict[int, tuple[Snapshot, int]] = {}
    for own, (kind, rank, idle) in enumerate(events, 1):
        if kind == "repeat" and rank in said_last:  # a heartbeat
            said, number = said_last[rank]
            assert steps.number(str(rank), said, 0) == number
        if kind != "step":
            # Where all begin anew, a rank that never reported would tell nothing.
            anew = kind in ("restart all", "retry")
            if not anew or len(reported) == RANKS:
                group.change(kind, rank)
                reported = set() if anew else reported
            continue
        group.step += 1
        busy = [one for one in range(RANKS) if one != idle or group.step == 1]
        reported.update(busy)
        for one in sorted(busy, key=lambda each: (each - rank) % RANKS):
            said = told(str(group.epochs[one]), group.wave, group.step, own)
            number = steps.number(str(one), said, 0)
            said_last[one] = said, number
            at = group.life, group.wave, group.step
            assert numbers.setdefault(at, number) == number
        assert number > last
        last = number


def test_a_count_goes_on_from_steps_that_were_counted_otherwise() -> None:
    steps = SharedSteps()
    assert steps.number("a", told("e1", 3, 2), 40) == 42
    steps.forget("a")
    assert steps.number("a", told("e2", 3, 2), 42) == 42


def test_a_late_rank_is_a_wave_behind_at_most() -> None:
    steps = SharedSteps()
    numbers = [steps.number("a", told("e1", wave, 1), 0) for wave in range(4)]
    assert numbers == [1, 2, 3, 4]
    assert steps.number("b", told("e1", 2, 1), 0) == 3
