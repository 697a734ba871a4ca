"""Reports of plain decode groups, kept to tell whether the simulator's figures stay as they are.

python -m tests.support.plain_report
"""

from dataclasses import replace

from loadgen.report.origin import ROOT, Engines, origin
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import LawLengths
from tests.support.figure_files import write_figures
from tests.support.paper import PAPER

KEPT = ROOT / "tests/data/simulator/without_prefill.json"
CODE = ("router/core", "loadgen/simulator/decode", "loadgen/model", "tests/support/plain_report.py")
POLICIES = ("bfio", "least_tokens")
PLAIN = DecodeConfig(
    policy="bfio",
    lengths=LawLengths.parse("geometric:100,40"),
    workers=4,
    slots=8,
    pool=16,
    steps=120,
    warmup=20,
    **PAPER,
)


def plain_report(policy: str) -> dict[str, object]:
    """Report of a simulated group."""
    return simulate(replace(PLAIN, policy=policy)).report()


if __name__ == "__main__":
    reports = {policy: plain_report(policy) for policy in POLICIES}
    write_figures(KEPT, reports, origin(Engines.SIMULATED, CODE))
