"""``evenstep`` with other weights of a peer's rule.

python -m tests.bench.league.tuned kv_cost=64 serve --policy kv_cost …
python -m tests.bench.league.tuned prefix_score=1,0.5,2 serve --policy prefix_score …
"""

import sys

from router.core.policies import prompts
from router.core.policies.baselines import Choose


def weigh(rule: str, weights: tuple[float, ...]) -> None:
    """Replace the default weights of ``kv_cost`` or ``prefix_score``."""
    cost, score = prompts.kv_cost, prompts.prefix_score

    def tuned_cost(prompt_weight: float = weights[0]) -> Choose:
        return cost(prompt_weight)

    def tuned_score(seed: int) -> Choose:
        return score(seed, *weights)

    if rule == "kv_cost":
        prompts.kv_cost = tuned_cost
    elif rule == "prefix_score":
        prompts.prefix_score = tuned_score  # type: ignore[assignment]
    else:
        raise SystemExit(f"no weights of {rule}")


if __name__ == "__main__":
    from router.cli import main

    name, _, given = sys.argv.pop(1).partition("=")
    weigh(name, tuple(map(float, given.split(","))))
    main()
