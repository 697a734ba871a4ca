"""``evenstep simulate chains``: policies and placements on chains of unequal servers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from rich.console import Console

from loadgen.chains.chains_config import Allocation, Blocks, ChainsConfig
from loadgen.chains.chains_results import compare
from loadgen.chains.chains_table import chains_table
from loadgen.chains.scenario import SCENARIOS, Scenario, scenario_of
from loadgen.chains.work import Arrivals, Measured, Service
from loadgen.run.options import command_of, same_named
from loadgen.run.simulation_options import JsonFlag, flag, trace_flag
from loadgen.traces.trace import load_trace
from router.commands.json_output import STDOUT, write_json
from router.core.errors import ConfigError
from router.core.placement.tuning import Criterion
from router.core.policies.policy_table import POLICIES
from router.core.types import Dispatch

_TRACE = "azure-conv"

_Policy = Annotated[
    str,
    flag(
        "--policy",
        "One or several, compared on the same requests: "
        f"{', '.join(name for name, row in POLICIES.items() if not row.looks_ahead)}.",
        "P[,P]",
    ),
]
_Scenario = Annotated[
    str, flag("--scenario", f"Servers and model: {', '.join(SCENARIOS)}.", "NAME")
]
_Servers = Annotated[int | None, flag("--servers", "How many [the scenario's].", "J")]
_FastShare = Annotated[
    float | None, flag("--fast-share", "Share of them that is fast [the scenario's].", "ETA")
]
_Rate = Annotated[
    float | None, flag("--rate", "Requests/s that blocks are placed for [the scenario's].", "R")
]
_Load = Annotated[
    float | None,
    flag("--load", "Requests come at this share of what all chains complete [at --rate].", "X"),
]
_TargetLoad = Annotated[
    float, flag("--target-load", "Highest share of their rate that chains are planned for.", "RHO")
]
_Placement = Annotated[Blocks, flag("--placement", "Who places blocks.")]
_Allocation = Annotated[
    Allocation | None,
    flag(
        "--allocation",
        "How memory becomes slots: chains that share servers, that do not, the fewest slots that "
        "suffice (HiGHS), or no chains: each request finds its way [by the placement].",
    ),
]
_Reserved = Annotated[
    int | None,
    flag("--reserved", "Slots kept free for each block [tuned; petals 2; bprr by the rate].", "C"),
]
_TuneBy = Annotated[
    Criterion, flag("--tune-by", "What the reserved slots are tuned by, with gbp_cr.")
]
_Requests = Annotated[int, flag("--requests", "How many come, in each repeat.", "N")]
_Warmup = Annotated[int, flag("--warmup", "Of these, left out of the averages.", "N")]
_Repeats = Annotated[int, flag("--repeats", "With other requests, on the same servers.", "N")]
_Seed = Annotated[int, flag("--seed", "Of servers, requests and random choices.", "S")]
_Arrivals = Annotated[
    Arrivals, flag("--arrivals", "Poisson, or a trace's gaps, stretched to the rate.")
]
_Service = Annotated[
    Service, flag("--service", "Work: exponential, or by the lengths of a trace's requests.")
]
_Trace = Annotated[str | None, trace_flag(_TRACE)]
_Dispatch = Annotated[
    Dispatch,
    flag(
        "--dispatch",
        "From one queue when a slot is free, or at once on arrival; of several policies, those "
        "that cannot do that keep the one queue.",
    ),
]


@dataclass(frozen=True, slots=True)
class ChainsOptions:
    """The command line of ``evenstep simulate chains``."""

    policy: _Policy = "jffc"
    scenario: _Scenario = "bloom176b"
    servers: _Servers = None
    fast_share: _FastShare = None
    rate: _Rate = None
    load: _Load = None
    target_load: _TargetLoad = 0.7
    placement: _Placement = Blocks.GBP_CR
    allocation: _Allocation = None
    reserved: _Reserved = None
    tune_by: _TuneBy = Criterion.LOWER
    requests: _Requests = 20_000
    warmup: _Warmup = 2_000
    repeats: _Repeats = 5
    seed: _Seed = 0
    arrivals: _Arrivals = Arrivals.POISSON
    service: _Service = Service.EXPONENTIAL
    trace: _Trace = None
    dispatch: _Dispatch = Dispatch.POOL
    json_file: JsonFlag = None

    def config(self) -> ChainsConfig:
        """The simulation that the options describe.

        Raises:
            ConfigError: an invalid option; the message names it.
            InputError: no such trace, or one without arrival times.
        """
        named = scenario_of(self.scenario)
        scenario = replace(
            named,
            servers=named.servers if self.servers is None else self.servers,
            fast_share=named.fast_share if self.fast_share is None else self.fast_share,
        )
        return ChainsConfig(
            **same_named(self, ChainsConfig)
            | {
                "scenario": scenario,
                "policies": tuple(self.policy.split(",")),
                "blocks": self.placement,
                "measured": self._measured(scenario),
            }
        )

    def _measured(self, scenario: Scenario) -> Measured | None:
        timed = self.arrivals is Arrivals.TRACE
        if timed or self.service is Service.TRACE:
            return Measured.of(load_trace(self.trace or _TRACE), scenario, timed=timed)
        if self.trace is not None:
            raise ConfigError("--trace does nothing without --arrivals trace or --service trace")
        return None


@command_of(ChainsOptions)
def chains(options: ChainsOptions) -> None:
    """Simulate requests on chains of unequal servers, in virtual time.

    Servers that cannot hold a model alone hold it together, as chains of pipeline stages. Their
    round trips come from a stated synthetic law, which stands for the measured ones of the paper
    ("Serving Chain-structured Jobs with Large Memory Footprints").
    """
    result = compare(options.config())
    console = Console(stderr=options.json_file == STDOUT)
    console.print(chains_table(result), highlight=False, soft_wrap=True)
    write_json(result.report(), options.json_file)
