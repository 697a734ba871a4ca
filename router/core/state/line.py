"""What waits for several groups at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.core.state.group import Group


class Line:
    """The waiting requests of groups that serve the same ones: their number."""

    def __init__(self, group: Group) -> None:
        self.groups, self.waiting = [group], 0

    def merge(self, other: Line) -> None:
        """The groups of another line wait in this one."""
        self.waiting += other.waiting
        self.groups += other.groups
        for group in other.groups:
            group.line = self

    def part(self, group: Group, waiting: int) -> None:
        """A group waits alone from now on, with so many of the requests."""
        self.groups.remove(group)
        self.waiting -= waiting
        group.line = Line(group)
        group.line.waiting = waiting
