"""Cautions where the planning model is too optimistic, with figures.

The model takes a request's time as independent of the number of requests on the chain. This holds
while a decode step mostly reads weights, and while prompts leave the GPUs time. The cautions check
both.
"""

from collections.abc import Iterator, Sequence

from loadgen.planner.planned import Plan, Question, prompt_rate, sustained_rate
from loadgen.planner.vllm import Engine
from router.core.placement.model import Chain

# Ratio of a decode step with full slots to one with a single request that is worth a caution.
_SLOWER = 1.25


def step_ratio(question: Question, chain: Chain) -> float:
    """Time of a decode step with full slots over that with a single request."""

    def step_s(requests: float) -> float:
        return sum(
            blocks * question.footing.token_s(question.machines[server], requests)
            for server, blocks in zip(chain.servers, chain.blocks, strict=True)
        )

    return step_s(chain.slots) / step_s(1)


def cautions(plan: Plan, engines: Sequence[Engine]) -> Iterator[str]:
    """Sentences on where the plan promises too much."""
    question = plan.question
    lengths, most = question.footing.lengths, question.footing.model.max_tokens
    mean = lengths.input_tokens + lengths.output_tokens
    if most is not None and mean > most:
        yield (
            f"requests of {mean:,.0f} tokens, as they are in the mean, are longer than the model's "
            f"{most:,}: engines refuse them"
        )
    bound = [
        engine
        for engine in engines
        if prompt_rate(question, engine.chain) < engine.chain.slots * engine.chain.service_rate
    ]
    if bound:
        rate = sustained_rate(question, plan.disjoint)
        yield (
            f"prompts alone would keep a GPU of {_names(bound)} busy all the time before the slots "
            f"are full: expect less than {rate:.4g} requests/s in all, whatever memory allows"
        )
    ratios = {engine.name: step_ratio(question, engine.chain) for engine in engines}
    slower = [engine for engine in engines if ratios[engine.name] > _SLOWER]
    if slower:
        yield (
            f"with all slots busy a decode step of {_names(slower)} takes up to "
            f"{max(ratios.values()):.2g} times as long as planned, since the others' KV is read too"
        )


def _names(engines: Sequence[Engine]) -> str:
    shown = ", ".join(engine.name for engine in engines[:3])
    return shown if len(engines) <= 3 else f"{shown} and {len(engines) - 3} more"
