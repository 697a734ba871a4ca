from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lifecycle:
    """Stage of the shutdown: the router drains, then accepts nothing new.

    Attributes:
        drain_delay_s: time spent draining.
        grace_s: time that open answers may take after that.
        draining: whether balancers are warned off; requests are still served.
        closed: whether new requests are refused.
    """

    drain_delay_s: float = 0.0
    grace_s: float = 30.0
    draining: bool = False
    closed: bool = False
