"""How far a router is from its end; what ends it moves this on, what answers looks at it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lifecycle:
    """First it drains, then it takes nothing new any more.

    Attributes:
        drain_delay_s: how long it drains.
        grace_s: how long open answers may go on when nothing new is taken.
        draining: others are told to send their requests elsewhere; those that come are served.
        closed: no new requests are served.
    """

    drain_delay_s: float = 0.0
    grace_s: float = 30.0
    draining: bool = False
    closed: bool = False
