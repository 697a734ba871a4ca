"""All studies by name, in the order of appearance; a new study is one file and one row."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loadgen.figures.studies import (
    arrivals,
    chain_blocks,
    chain_caches,
    chain_overall,
    chain_policies,
    chain_reserve,
    chain_trace,
    clearing,
    deadlines,
    dispatch,
    handoff,
    horizon,
    kv_pressure,
    prefill,
    release,
    request_cost,
    scale,
    table1,
    theorems,
    trajectories,
    wait,
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
        "kv_pressure": kv_pressure.STUDY,
        "clearing": clearing.STUDY,
        "wait": wait.STUDY,
        "chain_blocks": chain_blocks.STUDY,
        "chain_caches": chain_caches.STUDY,
        "chain_policies": chain_policies.STUDY,
        "chain_reserve": chain_reserve.STUDY,
        "chain_overall": chain_overall.STUDY,
        "chain_trace": chain_trace.STUDY,
    }
)
