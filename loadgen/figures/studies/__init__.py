"""All studies by name, in the order of appearance; a new study is one file and one row."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loadgen.figures.studies import (
    arrivals_study,
    chain_blocks,
    chain_caches,
    chain_overall,
    chain_policies,
    chain_reserve,
    chain_trace,
    clearing,
    deadlines_study,
    dispatch,
    handoff_study,
    horizon,
    kv_pressure,
    prefill_study,
    release,
    request_cost,
    scale,
    table1,
    theorems,
    trajectories,
    wait_study,
)
from loadgen.figures.study import Study

STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        "table1": table1.STUDY,
        "release": release.STUDY,
        "scale": scale.STUDY,
        "arrivals": arrivals_study.STUDY,
        "deadlines": deadlines_study.STUDY,
        "horizon": horizon.STUDY,
        "trajectories": trajectories.STUDY,
        "theorems": theorems.STUDY,
        "dispatch": dispatch.STUDY,
        "request_cost": request_cost.STUDY,
        "prefill": prefill_study.STUDY,
        "handoff": handoff_study.STUDY,
        "kv_pressure": kv_pressure.STUDY,
        "clearing": clearing.STUDY,
        "wait": wait_study.STUDY,
        "chain_blocks": chain_blocks.STUDY,
        "chain_caches": chain_caches.STUDY,
        "chain_policies": chain_policies.STUDY,
        "chain_reserve": chain_reserve.STUDY,
        "chain_overall": chain_overall.STUDY,
        "chain_trace": chain_trace.STUDY,
    }
)
