"""GBP-CR beside the best of all groupings, on small random fleets.

    python tests/bench/bench_gbp_cr.py [--instances 400] [--seed 1] [--json FILE]

The objective is that of (10), the number of chains; a fleet that GBP-CR calls too slow while some
grouping is fast enough is counted apart. Half of the fleets have one memory size (Theorem 3.4:
always optimal), half have not.
"""

import argparse
import itertools
import math
from pathlib import Path
from random import Random
from statistics import fmean

from loadgen.report.origin import Engines, origin
from router.core.placement.gbp_cr import Fleet, gbp_cr, lay_out
from tests.support.figure_files import write_figures
from tests.support.placements import fewest_chains, random_model, random_servers

CODE = ("router/core/placement", "tests/support/placements.py", "tests/bench/bench_gbp_cr.py")
SERVERS = (2, 7)
LOAD = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for what was measured")
    asked, kept = parser.parse_args(), {}
    rng = Random(asked.seed)
    for alike in (True, False):
        drawn = (compared(rng, alike) for _ in itertools.count())
        served = ((found, fewest) for found, fewest in drawn if fewest)
        pairs = list(itertools.islice(served, asked.instances // 2))
        ratios = [found / fewest for found, fewest in pairs if found]
        kept["equal" if alike else "unequal"] = {
            "fleets": len(pairs),
            "optimal": ratios.count(1),
            "called_too_slow": len(pairs) - len(ratios),
            "mean_ratio": round(fmean(ratios), 4),
            "worst_ratio": round(max(ratios), 4),
        }
        print(
            f"{'equal' if alike else 'unequal'} memory: {len(pairs)} fleets that some grouping can "
            f"serve; optimal in {ratios.count(1)}, called too slow {len(pairs) - len(ratios)}; "
            f"ratio to the best {fmean(ratios):.4f} in the mean, {max(ratios):.2f} at worst"
        )
    if asked.json:
        write_figures(asked.json, kept, origin(Engines.SIMULATED, CODE))


def compared(rng: Random, alike: bool) -> tuple[int, int]:
    """Chains of GBP-CR, and of the best grouping; 0: too slow."""
    servers = random_servers(rng, rng.randint(*SERVERS), alike=alike)
    model, reserved = random_model(rng), rng.randint(1, 3)
    most = lay_out(model, Fleet.of(servers), reserved, math.inf, LOAD).scaled_rates[-1]
    rate = rng.uniform(0.05, 1.2) * most * reserved * LOAD
    grouping = gbp_cr(model, servers, reserved, rate, LOAD)
    fewest = fewest_chains(model, servers, reserved, rate / (LOAD * reserved))
    return len(grouping.chains) if grouping.enough else 0, fewest or 0


if __name__ == "__main__":
    main()
