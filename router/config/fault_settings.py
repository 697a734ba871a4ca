from router.config.setting import DAY_S, HOUR_S, MOMENT_S, WEEK_S, SettingGroup, advanced, live
from router.core.queue.retry import Deadlines
from router.core.state.breaker import DEFAULTS


class FaultSettings(SettingGroup):
    """Faults: retries, circuit breakers, ejection and deadlines."""

    retry_budget: float = live(
        0.2,
        "Retries of failed answers (408, 429, 5xx, too slow), as a share of a group's requests of "
        "the last 10 s.",
        metavar="SHARE",
        between=(0, 10),
    )
    retry_min_per_s: float = live(
        10.0,
        "Retries a second that are allowed in any case, on average over 10 s.",
        metavar="N",
        between=(0, 1e6),
    )
    breaker_failures: int = advanced(
        DEFAULTS.breaker_failures, "Failures in a row that eject a worker.", between=(1, 1_000_000)
    )
    breaker_share: float = advanced(
        DEFAULTS.breaker_share,
        "Share of failed requests that ejects a worker too, with at least 10 requests in the "
        "window.",
        metavar="SHARE",
        between=(0.001, 1),
    )
    breaker_window_s: float = advanced(
        DEFAULTS.breaker_window_s, "Window of that share.", between=(MOMENT_S, DAY_S)
    )
    breaker_open_s: float = advanced(
        DEFAULTS.breaker_open_s,
        "Length of a worker's first ejection; each further one is twice as long, up to 60 s.",
        between=(MOMENT_S, HOUR_S),
    )
    breaker_trials: int = advanced(
        DEFAULTS.breaker_trials,
        "Requests that must succeed before an ejected worker returns.",
        between=(1, 1_000_000),
    )
    max_ejected: float = advanced(
        DEFAULTS.max_ejected,
        "Share of a group's live workers that may be ejected, never the last one; 0: none.",
        metavar="SHARE",
        between=(0, 1),
    )
    slow_start_s: float = advanced(
        DEFAULTS.slow_start_s,
        "Time in which a worker that returns gets all its slots back, one after the other.",
        between=(0, DAY_S),
    )
    request_timeout_s: float | None = live(
        None,
        "Longest life of a request, with its wait; unset: no limit.",
        between=(MOMENT_S, WEEK_S),
    )
    first_byte_timeout_s: float | None = live(
        None,
        "Longest wait for the first byte of a worker's answer (the last byte, if it is not "
        "streamed); then another worker gets the request; unset: no limit.",
        between=(MOMENT_S, WEEK_S),
    )
    stream_idle_timeout_s: float | None = live(
        300.0, "Longest silence of a worker within a stream.", between=(MOMENT_S, WEEK_S)
    )

    @property
    def deadlines(self) -> Deadlines:
        return self.of(Deadlines)
