"""All studies by name, in the order of appearance; a new study is one class and one row."""

from collections.abc import Mapping

from loadgen.figures.studies import (
    arrivals_study,
    chain_parts,
    chain_wholes,
    delays,
    handoff_study,
    kv_pressure,
    paper,
    scaling,
    serving_study,
    step_costs,
    wait_study,
)
from loadgen.figures.study import Study

STUDIES: Mapping[str, Study] = {
    "table1": paper.Table1Study(),
    "release": paper.ReleaseStudy(),
    "scale": scaling.ScaleStudy(),
    "arrivals": arrivals_study.ArrivalsStudy(),
    "deadlines": delays.DeadlinesStudy(),
    "horizon": paper.HorizonStudy(),
    "trajectories": paper.TrajectoriesStudy(),
    "theorems": scaling.TheoremsStudy(),
    "dispatch": delays.DispatchStudy(),
    "request_cost": step_costs.RequestCostStudy(),
    "prefill": step_costs.PrefillStudy(),
    "serving": serving_study.ServingRulesStudy(),
    "serving_budgets": serving_study.ServingBudgetsStudy(),
    "serving_rates": serving_study.ServingRatesStudy(),
    "serving_traffic": serving_study.ServingTrafficStudy(),
    "serving_alone": serving_study.ServingAloneStudy(),
    "serving_costs": serving_study.ServingCostsStudy(),
    "handoff": handoff_study.HandoffStudy(),
    "kv_pressure": kv_pressure.KvPressureStudy(),
    "clearing": kv_pressure.ClearingStudy(),
    "wait": wait_study.WaitStudy(),
    "chain_blocks": chain_parts.ChainBlocksStudy(),
    "chain_caches": chain_parts.ChainCachesStudy(),
    "chain_policies": chain_wholes.ChainPoliciesStudy(),
    "chain_reserve": chain_parts.ChainReserveStudy(),
    "chain_overall": chain_wholes.ChainOverallStudy(),
    "chain_trace": chain_wholes.ChainTraceStudy(),
}
