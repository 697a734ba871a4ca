"""Read by each of vLLM's processes at its start, for what CPU engines need of the system.

They sleep for a moment where they would yield. vLLM's engine and worker look for each other's
messages in a loop that yields the processor. Linux 6.18 leaves other processes on that processor
without time meanwhile, for seconds on end: measured on two cores, up to 4 s, against 17 ms with
this, at 435 tokens/s instead of 706.

They request AMX of the kernel. vLLM 0.32 computes attention with it where the processor has it, and
requests nothing; Linux ends a process with SIGILL that uses AMX without a request.
"""

import ctypes
import os
import platform
import time

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18

os.sched_yield = lambda: time.sleep(50e-6)
if platform.machine() == "x86_64":
    # Refused where there is none: vLLM then computes in another way.
    ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)
