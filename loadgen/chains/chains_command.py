"""``evenstep simulate chains``: policies and placements on chains of unequal servers."""

import math

from rich.console import Console, Group, RenderableType
from rich.text import Text

from loadgen.chains.chains_config import ChainsOptions
from loadgen.chains.chains_results import ChainsResult, compare
from loadgen.report.numbers import number, plain_table, with_interval
from loadgen.run.options import command_of
from router.commands.json_output import STDOUT, write_json


@command_of(ChainsOptions)
def chains(options: ChainsOptions) -> None:
    """Simulate requests on chains of unequal servers, in virtual time.

    Servers that cannot hold a model alone hold it together, as chains of pipeline stages. Their
    round trips come from a stated synthetic law, which stands for the measured ones of the paper
    ("Serving Chain-structured Jobs with Large Memory Footprints").
    """
    result = compare(options)
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
            with_interval(each.mean),
            number(each.response_p99_s),
            number(each.waiting_s),
            number(each.service_s),
            "" if each is first else with_interval(against, 100.0),
        )
    config = result.options
    notes = [
        f"{result.rate:.4g} requests/s of at most {result.composed.total_rate:.4g}: "
        + ("stable" if result.stable else "more than they complete, so the queue only grows"),
        f"placement {config.placement}, allocation {config.allocated}, planned for "
        f"{config.planned_rate:g}/s, {result.composed.reserved_slots} slots reserved per block; "
        f"{config.deployment.servers} servers, round trips drawn from a synthetic law",
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
