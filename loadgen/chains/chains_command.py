"""``evenstep simulate chains``: policies and placements on chains of unequal servers."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

from rich.console import Console, Group, RenderableType
from rich.text import Text

from loadgen.chains.chains_config import Allocation, Blocks, ChainsConfig
from loadgen.chains.chains_results import ChainsResult, compare
from loadgen.chains.scenario import SCENARIOS
from loadgen.chains.work import Arrivals, Measured, Service
from loadgen.report.intervals import Estimate
from loadgen.report.numbers import number, plain_table
from loadgen.run.options import command_of, flag, same_named
from loadgen.run.simulation_options import JsonFlag, trace_flag
from loadgen.traces.trace import load_trace
from router.commands.json_output import STDOUT, write_json
from router.core.errors import ConfigError
from router.core.placement.tuning import Criterion
from router.core.policies.policy_table import POLICIES
from router.core.types import Dispatch

_TRACE = "azure-conv"


@dataclass(frozen=True, slots=True)
class ChainsOptions:
    """Its command line."""

    policy: Annotated[
        str,
        flag(
            "One or several, compared on the same requests: "
            f"{', '.join(name for name, row in POLICIES.items() if not row.looks_ahead)}.",
            "P[,P]",
        ),
    ] = "jffc"
    scenario: Annotated[str, flag(f"Servers and model: {', '.join(SCENARIOS)}.", "NAME")] = (
        "bloom176b"
    )
    servers: Annotated[int | None, flag("How many [the scenario's].", "J")] = None
    fast_share: Annotated[
        float | None, flag("Share of them that is fast [the scenario's].", "ETA")
    ] = None
    rate: Annotated[
        float | None, flag("Requests/s that blocks are placed for [the scenario's].", "R")
    ] = None
    load: Annotated[
        float | None,
        flag("Requests come at this share of what all chains complete [at --rate].", "X"),
    ] = None
    target_load: Annotated[
        float, flag("Highest share of their rate that chains are planned for.", "RHO")
    ] = 0.7
    placement: Annotated[Blocks, flag("Who places blocks.")] = Blocks.GBP_CR
    allocation: Annotated[
        Allocation | None,
        flag(
            "How memory becomes slots: chains that share servers, that do not, the fewest "
            "slots that suffice (HiGHS), or no chains: each request finds its way [by the "
            "placement]."
        ),
    ] = None
    reserved: Annotated[
        int | None, flag("Slots kept free for each block [tuned; petals 2; bprr by the rate].", "C")
    ] = None
    tune_by: Annotated[Criterion, flag("What the reserved slots are tuned by, with gbp_cr.")] = (
        Criterion.LOWER
    )
    requests: Annotated[int, flag("How many come, in each repeat.", "N")] = 20_000
    warmup: Annotated[int, flag("Of these, left out of the averages.", "N")] = 2_000
    repeats: Annotated[int, flag("With other requests, on the same servers.", "N")] = 5
    seed: Annotated[int, flag("Of servers, requests and random choices.", "S")] = 0
    arrivals: Annotated[Arrivals, flag("Poisson, or a trace's gaps, stretched to the rate.")] = (
        Arrivals.POISSON
    )
    service: Annotated[
        Service, flag("Work: exponential, or by the lengths of a trace's requests.")
    ] = Service.EXPONENTIAL
    trace: Annotated[str | None, trace_flag(_TRACE)] = None
    dispatch: Annotated[
        Dispatch,
        flag(
            "From one queue when a slot is free, or at once on arrival; of several policies, those "
            "that cannot do that keep the one queue."
        ),
    ] = Dispatch.POOL
    json_file: JsonFlag = None

    def config(self) -> ChainsConfig:
        """ConfigError names an invalid option; InputError: no such trace, or one without times."""
        if self.scenario not in SCENARIOS:
            raise ConfigError(
                f"--scenario: there is no {self.scenario!r}; there is {', '.join(SCENARIOS)}"
            )
        named = SCENARIOS[self.scenario]
        scenario = replace(
            named,
            servers=named.servers if self.servers is None else self.servers,
            fast_share=named.fast_share if self.fast_share is None else self.fast_share,
        )
        measured = None
        timed = self.arrivals is Arrivals.TRACE
        if timed or self.service is Service.TRACE:
            measured = Measured.of(load_trace(self.trace or _TRACE), scenario, timed=timed)
        elif self.trace is not None:
            raise ConfigError("--trace does nothing without --arrivals trace or --service trace")
        return ChainsConfig(
            **same_named(self, ChainsConfig)
            | {
                "scenario": scenario,
                "policies": tuple(self.policy.split(",")),
                "blocks": self.placement,
                "measured": measured,
            }
        )


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


def chains_table(result: ChainsResult) -> RenderableType:
    """Chains, policies, and what their results depend on."""
    first = result.policies[0]
    columns = ("policy", "response, s", "p99, s", "waiting, s", "service, s")
    table = plain_table(*columns, f"vs {first.policy}, %")
    for each in result.policies:
        against = result.against_first(each)
        table.add_row(
            f"{each.policy} ({each.dispatch.value})",
            _with_interval(each.mean),
            number(each.response_p99_s),
            number(each.waiting_s),
            number(each.service_s),
            "" if each is first else _with_interval(against, 100.0),
        )
    config = result.config
    scenario = config.scenario
    notes = [
        f"{result.rate:.4g} requests/s of at most {result.composed.total_rate:.4g}: "
        + ("stable" if result.stable else "more than they complete, so the queue only grows"),
        f"placement {config.blocks}, allocation {config.allocated}, planned for "
        f"{config.planned_rate:g}/s, {result.composed.reserved_slots} slots reserved per block; "
        f"{scenario.servers} servers, round trips drawn from a synthetic law",
        f"{config.requests} requests, the first {config.warmup} left out; {config.repeats} "
        f"repeats, seed {config.seed}; arrivals {config.arrivals.value}, service "
        f"{config.service.value}",
    ]
    if result.bounds is not None and math.isfinite(result.bounds.upper_s):
        low, high = number(result.bounds.lower_s), number(result.bounds.upper_s)
        notes.insert(1, f"jffc with Poisson arrivals and exponential work: {low} to {high} s")
    return Group(_chains(result), Text(), table, *map(Text, notes))


def _chains(result: ChainsResult) -> RenderableType:
    ready = result.composed
    if not ready.chains:
        return Text("no chains: each request takes the fastest path with memory as it begins")
    table = plain_table("chain", "slots", "service, s", "servers (blocks)")
    for at, chain in enumerate(ready.chains):
        servers = ", ".join(
            f"{ready.placement.servers[server].name} ({blocks})"
            for server, blocks in zip(chain.servers, chain.blocks, strict=True)
        )
        table.add_row(str(at), str(chain.slots), number(chain.service_s), servers)
    return table


def _with_interval(value: Estimate, scale: float = 1.0) -> str:
    text = number(value.mean * scale)
    if value.half_width is None:
        return text
    return f"{text} +- {number(value.half_width * scale, 2)}"
