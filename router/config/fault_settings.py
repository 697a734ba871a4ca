from router.config.setting import DAY_S, HOUR_S, MOMENT_S, WEEK_S, SettingGroup, setting
from router.core.queue.retry import Deadlines
from router.core.state.breaker import DEFAULTS


class FaultSettings(SettingGroup):
    """Faults: retries, circuit breakers, ejection and deadlines."""

    retry_budget: float = setting(
        0.2,
        "Retries of failed answers (408, 429, 5xx, too slow), as a share of a group's requests of "
        "the last 10 s.",
        metavar="SHARE",
        between=(0, 10),
        live=True,
    )
    retry_min_per_s: float = setting(
        10.0,
        "Retries a second that are allowed in any case, on average over 10 s.",
        metavar="N",
        between=(0, 1e6),
        live=True,
    )
    breaker_failures: int = setting(
        DEFAULTS.breaker_failures,
        "Failures in a row that eject a worker.",
        between=(1, 1_000_000),
        advanced=True,
    )
    breaker_share: float = setting(
        DEFAULTS.breaker_share,
        "Share of failed requests that ejects a worker too, with at least 10 requests in the "
        "window.",
        metavar="SHARE",
        between=(0.001, 1),
        advanced=True,
    )
    breaker_window_s: float = setting(
        DEFAULTS.breaker_window_s, "Window of that share.", between=(MOMENT_S, DAY_S), advanced=True
    )
    breaker_open_s: float = setting(
        DEFAULTS.breaker_open_s,
        "Length of a worker's first ejection; each further one is twice as long, up to 60 s.",
        between=(MOMENT_S, HOUR_S),
        advanced=True,
    )
    breaker_trials: int = setting(
        DEFAULTS.breaker_trials,
        "Requests that must succeed before an ejected worker returns.",
        between=(1, 1_000_000),
        advanced=True,
    )
    max_ejected: float = setting(
        DEFAULTS.max_ejected,
        "Share of a group's live workers that may be ejected, never the last one; 0: none.",
        metavar="SHARE",
        between=(0, 1),
        advanced=True,
    )
    slow_start_s: float = setting(
        DEFAULTS.slow_start_s,
        "Time in which a worker that returns gets all its slots back, one after the other.",
        between=(0, DAY_S),
        advanced=True,
    )
    request_timeout_s: float | None = setting(
        None,
        "Longest life of a request, with its wait; unset: no limit.",
        between=(MOMENT_S, WEEK_S),
        live=True,
    )
    first_byte_timeout_s: float | None = setting(
        None,
        "Longest wait for the first byte of a worker's answer (the last byte, if it is not "
        "streamed); then another worker gets the request; unset: no limit.",
        between=(MOMENT_S, WEEK_S),
        live=True,
    )
    stream_idle_timeout_s: float | None = setting(
        300.0, "Longest silence of a worker within a stream.", between=(MOMENT_S, WEEK_S), live=True
    )

    @property
    def deadlines(self) -> Deadlines:
        return self.of(Deadlines)
