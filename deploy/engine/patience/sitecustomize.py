"""Read by each of vLLM's processes at its start: they sleep for a moment where they would yield.

vLLM's engine and worker look for each other's messages in a loop that yields the processor. Linux
6.18 leaves other processes on that processor without time meanwhile, for seconds on end: measured
on two cores, up to 4 s, against 17 ms with this, at 435 tokens/s instead of 706.
"""

import os
import time

os.sched_yield = lambda: time.sleep(50e-6)
