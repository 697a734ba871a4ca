"""Loaded at the start of each vLLM process: two system settings for CPU engines.

A yield becomes a short sleep. vLLM's engine and worker poll for each other's messages in a loop of
yields, and Linux 6.18 starves other processes on that processor meanwhile. Measured on two cores:
up to 4 s, against 17 ms with this, at 435 tokens/s instead of 706.

AMX is requested from the kernel. vLLM 0.32 computes attention with AMX where the processor has it,
without a request; Linux ends such a process with SIGILL.
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
    # The kernel refuses if there is no AMX; vLLM then computes in another way.
    ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)
