"""Barrier-synchronized decode in virtual time (arXiv 2601.17855, section 2).

Step k: (1) requests arrive, with prefill workers once their prompts are computed; (2) the router's
own code decides; (3) every running request takes one step, which lasts C + max_g (t_l L_g + t_r
n_g). The slots of requests that end with it are free at step k + 1.
"""

import math

from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_engines import Engines
from loadgen.simulator.decode.decode_results import DecodeResult, Recorder
from loadgen.simulator.decode.prefill_workers import Prefill
from loadgen.simulator.decode.request_streams import Stream, open_stream
from loadgen.simulator.decode.simulated_router import Front
from router.core.clock import Clock
from router.core.policies.policy_protocol import Policy
from router.core.types import Dispatch


def simulate(
    config: DecodeConfig,
    *,
    clock: Clock | None = None,
    policy: Policy | None = None,
    stream: Stream | None = None,
    keep_records: bool = False,
) -> DecodeResult:
    """Run one simulation; equal configurations give equal results, except for decision times.

    Decisions are timed by ``clock``. ``policy`` and ``stream`` replace the configured ones.

    Raises:
        ConfigError: a prompt that the memory of a prefill worker cannot hold.
        InputError: the trace has no arrival times, or ends within the warm-up.
    """
    return _Simulation(config, clock, policy, stream).run(keep_records=keep_records)


class _Simulation:
    def __init__(
        self,
        config: DecodeConfig,
        clock: Clock | None,
        policy: Policy | None,
        stream: Stream | None,
    ) -> None:
        self._config = config
        self._stream = stream or open_stream(
            config.arrivals, config.lengths, config.pool, config.seed
        )
        self._prefill = Prefill(config.prefill, self._stream) if config.prefill else None
        if self._prefill:
            self._stream = self._prefill
        self._recorder = Recorder(config.warmup)
        self._engines = Engines(
            config.workers,
            config.slots,
            config.true_profile,
            self._prefill.fetch if self._prefill else None,
        )
        self._front = Front(config, self._engines, self._recorder, policy, clock)
        self._now_s = 0.0

    def run(self, *, keep_records: bool) -> DecodeResult:
        step = 0
        while step < self._config.steps and self._step(step):
            step += 1
        self._front.close(step)
        parameters = self._config.described() | self._front.parameters
        prefill = self._prefill.result() if self._prefill else None
        return self._recorder.result(
            self._config.power, parameters, prefill, keep_records=keep_records
        )

    def _step(self, step: int) -> bool:
        """False: no work is left."""
        idle_s = self._rest()
        if idle_s is None:
            return False
        engines, recorder, config = self._engines, self._recorder, self._config
        queued = int(engines.queued.sum())
        inside = self._front.waiting + queued + int(engines.running.sum())
        # Requests wait for a slot in the pool, or else in the engines.
        waiting = self._front.waiting + (0 if config.dispatch is Dispatch.POOL else queued)
        for job in self._stream.due(self._now_s, waiting, inside):
            self._front.arrive(job, step, self._now_s)
        if self._prefill and step == config.warmup:
            self._prefill.meter.restart()
        self._front.decide(step, self._now_s)
        starts = engines.begin(step, self._now_s)
        recorder.started(step, starts)
        step_time = config.step_time
        seconds = step_time.base_s + step_time.per_token_s * float(engines.work(step).max())
        self._front.stepped(len(starts), seconds)
        recorder.step(
            seconds, idle_s, engines.tokens(step), engines.decoding(step), self._front.waiting
        )
        self._now_s += seconds
        begun = engines.first_tokens(step)
        recorder.first_tokens(begun, self._now_s)
        if self._prefill:
            for job, _, start_step, *_ in begun:
                self._prefill.first_token(job, self._now_s, counts=start_step >= config.warmup)
        ended = engines.finish(step)
        recorder.finished(step, ended, self._now_s)
        self._front.learn(ended)
        return True

    def _rest(self) -> float | None:
        """Skip to the next arrival if the system is empty; None if no request will come."""
        if self._front.waiting or not self._engines.empty:
            return 0.0
        next_s = self._stream.next_s()
        if next_s == math.inf:
            return None
        idle_s = max(0.0, next_s - self._now_s)
        self._now_s = max(self._now_s, next_s)
        return idle_s
