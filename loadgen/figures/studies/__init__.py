"""All studies by name, in the order of appearance; a new study is one file and one row."""

from collections.abc import Mapping
from types import MappingProxyType

from loadgen.figures.studies import (
    arrivals_study,
    chain_parts,
    chain_wholes,
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
    serving_study,
    table1,
    theorems,
    trajectories,
    wait_study,
)
from loadgen.figures.study import Study

STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        "table1": table1.Table1Study(),
        "release": release.ReleaseStudy(),
        "scale": scale.ScaleStudy(),
        "arrivals": arrivals_study.ArrivalsStudy(),
        "deadlines": deadlines_study.DeadlinesStudy(),
        "horizon": horizon.HorizonStudy(),
        "trajectories": trajectories.TrajectoriesStudy(),
        "theorems": theorems.TheoremsStudy(),
        "dispatch": dispatch.DispatchStudy(),
        "request_cost": request_cost.RequestCostStudy(),
        "prefill": prefill_study.PrefillStudy(),
        "serving": serving_study.ServingRulesStudy(),
        "serving_budgets": serving_study.ServingBudgetsStudy(),
        "serving_rates": serving_study.ServingRatesStudy(),
        "serving_traffic": serving_study.ServingTrafficStudy(),
        "serving_alone": serving_study.ServingAloneStudy(),
        "serving_costs": serving_study.ServingCostsStudy(),
        "handoff": handoff_study.HandoffStudy(),
        "kv_pressure": kv_pressure.KvPressureStudy(),
        "clearing": clearing.ClearingStudy(),
        "wait": wait_study.WaitStudy(),
        "chain_blocks": chain_parts.ChainBlocksStudy(),
        "chain_caches": chain_parts.ChainCachesStudy(),
        "chain_policies": chain_wholes.ChainPoliciesStudy(),
        "chain_reserve": chain_parts.ChainReserveStudy(),
        "chain_overall": chain_wholes.ChainOverallStudy(),
        "chain_trace": chain_wholes.ChainTraceStudy(),
    }
)
