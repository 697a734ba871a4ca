"""``python -m tests.gpu [pair] …``: see ``measure`` and ``pair``; it looks first for what it needs.

A machine with a GPU may have no network: nothing is installed here.
"""

from __future__ import annotations

import sys

from tests.gpu.needed import NEEDED, OF_A_ROUTER, missing


def main() -> None:
    """Run what the command line names."""
    pair = sys.argv[1:2] == ["pair"]
    if absent := missing(NEEDED + OF_A_ROUTER * pair):
        sys.exit(
            f"tests.gpu: {sys.executable} has no {', '.join(absent)}: name an interpreter that "
            "does (make gpu GPU_PYTHON=…), or make venv where there is a network"
        )
    if pair:
        del sys.argv[1]
        from tests.gpu.pair import main as run
    else:
        from tests.gpu.measure import main as run
    run()


if __name__ == "__main__":
    main()
