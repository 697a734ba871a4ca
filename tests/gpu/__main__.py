"""``python -m tests.gpu [pair|group] …``: it looks first for what it needs.

See ``measure``, ``pair`` and ``group``.

A machine with a GPU may have no network: nothing is installed here.
"""

from __future__ import annotations

import sys
from importlib import import_module

from tests.gpu.needed import NEEDED, OF_A_ROUTER, missing


def main() -> None:
    """Run what the command line names."""
    named = sys.argv[1] if sys.argv[1:2] in (["pair"], ["group"]) else "measure"
    routed = named != "measure"
    if absent := missing(NEEDED + OF_A_ROUTER * routed):
        sys.exit(
            f"tests.gpu: {sys.executable} has no {', '.join(absent)}: name an interpreter that "
            "does (make gpu GPU_PYTHON=…), or make venv where there is a network"
        )
    if routed:
        del sys.argv[1]
    import_module(f"tests.gpu.{named}").main()


if __name__ == "__main__":
    main()
