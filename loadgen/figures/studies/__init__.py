"""All studies by name, in the order of their appearance: to add one, write a file and a row."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loadgen.figures.studies import (
    arrivals,
    deadlines,
    dispatch,
    handoff,
    horizon,
    prefill,
    release,
    request_cost,
    scale,
    table1,
    theorems,
    trajectories,
)
from loadgen.figures.study import Study

STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        "table1": table1.STUDY,
        "release": release.STUDY,
        "scale": scale.STUDY,
        "arrivals": arrivals.STUDY,
        "deadlines": deadlines.STUDY,
        "horizon": horizon.STUDY,
        "trajectories": trajectories.STUDY,
        "theorems": theorems.STUDY,
        "dispatch": dispatch.STUDY,
        "request_cost": request_cost.STUDY,
        "prefill": prefill.STUDY,
        "handoff": handoff.STUDY,
    }
)
