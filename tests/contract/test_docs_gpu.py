"""What the page says of GPUs is what is kept of a measurement on one, and how that is made."""

import json
from pathlib import Path

from tests.gpu.group import FILE as GROUP_FILE
from tests.gpu.measure import FILE, SHARES, Sizes
from tests.gpu.pair import FILE as PAIR_FILE
from tests.support.docs import README, text_of, words

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests" / "data" / "gpu"
PAGE = "docs/results/gpu.md"
SECTION = text_of(PAGE)
PROSE = words(SECTION)
LEDGER = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")]


def test_the_ledger_says_what_has_run() -> None:
    assert LEDGER[0] == ["what", "on a GPU", "elsewhere"]
    ran = {what.partition(":")[0]: gpu != "not run" for what, gpu, _ in LEDGER[2:]}
    assert ran["`make gpu`"] == on_a_gpu(FILE)
    assert ran["`make gpu GPU_FLAGS=pair`"] == on_a_gpu(PAIR_FILE)
    assert ran["`make gpu GPU_FLAGS=group`"] == on_a_gpu(GROUP_FILE)
    for text in (PROSE, words(text_of(README))):
        said = "Nothing of this repository has run on a GPU yet" in text
        assert said == (not any(ran.values()))


def on_a_gpu(name: str) -> bool:
    """Whether a measurement is kept that was made on one."""
    if not (KEPT / name).exists():
        return False
    return not json.loads((KEPT / name).read_text())["measured"]["settings"]["dry_run"]


def test_the_parts_and_their_time_are_said() -> None:
    *most, last = (f"{share:.0%}".removesuffix("%") for share in SHARES.values())
    assert f"The parts have {', '.join(most)} and {last} % of the time" in PROSE
    assert f"prompts of {min(Sizes().prompts)} to {max(Sizes().prompts):,} tokens" in PROSE
