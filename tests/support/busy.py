"""A busy machine, made by loops that never wait."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# It ends with the process that has started it.
_LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that take all the time they can get, until the end of the block."""
    with ExitStack() as stack:
        for _ in range(count):
            loop = subprocess.Popen([sys.executable, "-c", _LOOP])
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        yield
