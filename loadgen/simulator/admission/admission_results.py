"""Measurements of an admission simulation."""

from dataclasses import dataclass, fields

import numpy as np

from loadgen.simulator.admission.scenarios import Requests

WARMUP_SHARE = 0.15
"""Of the span of arrivals; what comes in it is left out."""


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """Figures from the end of the warm-up to the end of the last request."""

    # Evictions per thousand arrivals; a request may be evicted several times.
    evictions_per_1k: float
    throughput_tok_s: float  # output tokens per second, without discarded ones
    throughput_req_s: float
    latency_mean_s: float  # from a request's arrival
    latency_p99_s: float
    latency_max_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    completed: int
    preemptions: int  # evictions, including the warm-up
    kv_used_mean: float  # share of the KV memory held, over time
    kv_used_max: float
    step_mean_s: float
    end_s: float
    parameters: dict[str, object]  # everything that the result depends on

    def report(self) -> dict[str, object]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


class AdmissionRecorder:
    """Records a simulation as it runs; a request is named by its index in the order of arrival."""

    def __init__(self, requests: Requests, capacity_tokens: int) -> None:
        self._arrival_s = requests.arrival_s
        self.warmup_s = WARMUP_SHARE * float(requests.arrival_s[-1])
        self._capacity_tokens = capacity_tokens
        self._first_s = np.full(len(requests.arrival_s), np.nan)
        self._end_s = np.full(len(requests.arrival_s), np.nan)
        # Tokens generated, and evictions, at the end of the warm-up.
        self._at_warmup: tuple[int, int] | None = None
        self._held_token_s = 0.0
        self._most_tokens = 0
        self._steps = 0
        self._busy_s = 0.0

    def began(self, now_s: float, tokens: int, preemptions: int) -> None:
        """Tokens generated and evictions so far, at the start of a step."""
        if self._at_warmup is None and now_s >= self.warmup_s:
            self._at_warmup = tokens, preemptions

    def step(self, seconds: float, used_tokens: int) -> None:
        if self._at_warmup is None:
            return
        self._steps += 1
        self._busy_s += seconds
        self._most_tokens = max(self._most_tokens, used_tokens)
        self.hold(seconds, used_tokens)

    def hold(self, seconds: float, used_tokens: int) -> None:
        """Memory held for some time, with or without computation."""
        if self._at_warmup is not None:
            self._held_token_s += seconds * used_tokens

    def first_token(self, request: int, now_s: float) -> None:
        """Repetitions after an eviction do not count."""
        if np.isnan(self._first_s[request]):
            self._first_s[request] = now_s

    def ended(self, request: int, now_s: float) -> None:
        self._end_s[request] = now_s

    def result(
        self, now_s: float, tokens: int, preemptions: int, parameters: dict[str, object]
    ) -> AdmissionResult:
        tokens_before, preemptions_before = self._at_warmup or (0, 0)
        counted = self._arrival_s >= self.warmup_s
        latency_s = (self._end_s - self._arrival_s)[counted]
        ttft_s = (self._first_s - self._arrival_s)[counted]
        span_s = max(now_s - self.warmup_s, 1e-9)
        return AdmissionResult(
            evictions_per_1k=1000 * (preemptions - preemptions_before) / int(counted.sum()),
            throughput_tok_s=(tokens - tokens_before) / span_s,
            throughput_req_s=float((self._end_s >= self.warmup_s).sum()) / span_s,
            latency_mean_s=float(latency_s.mean()),
            latency_p99_s=float(np.percentile(latency_s, 99)),
            latency_max_s=float(latency_s.max()),
            ttft_mean_s=float(ttft_s.mean()),
            ttft_p99_s=float(np.percentile(ttft_s, 99)),
            completed=len(self._end_s),
            preemptions=preemptions,
            kv_used_mean=self._held_token_s / span_s / self._capacity_tokens,
            kv_used_max=self._most_tokens / self._capacity_tokens,
            step_mean_s=self._busy_s / self._steps if self._steps else 0.0,
            end_s=now_s,
            parameters=parameters,
        )
