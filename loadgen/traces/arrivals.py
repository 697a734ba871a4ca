"""Arrival processes of requests, in the notation of the commands."""

from dataclasses import dataclass
from typing import Literal, Self

from loadgen.model.ranges import number_in, whole
from router.core.errors import ConfigError

_RATES_PER_S = (1e-9, 1e6)
_MOST_CLIENTS = 1_000_000_000
_WORDS = {
    "RATE": f"RATE from {_RATES_PER_S[0]:g} to {_RATES_PER_S[1]:g} requests per second",
    "SCALE": "SCALE a factor on the trace's times",
    "N": "N a number of clients",
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival process of the requests.

    Full: a constant number of waiting requests; poisson: a rate, independent of the answers; trace:
    the trace's own times; closed: clients that each send their next request when they have the
    answer to the last.
    """

    kind: Literal["full", "poisson", "trace", "closed"]
    value: float = 0.0  # requests per second of poisson, factor on times, clients; else 0

    @classmethod
    def parse(cls, text: str, forms: str) -> Self:
        """Parse one of the forms, as in ``poisson:RATE|trace[:SCALE]|closed:N``."""
        kind, colon, value = text.partition(":")
        least, most = _RATES_PER_S
        form = {each.partition(":")[0].rstrip("["): each for each in forms.split("|")}.get(kind)
        match form:
            case "full" | "trace" if not colon:
                return cls(form)
            case "trace[:SCALE]" if not colon:
                return cls("trace", 1.0)
            case "closed:N" if 1 <= (whole(value) or 0) <= _MOST_CLIENTS:
                return cls("closed", int(value))
            case "poisson:RATE" if least <= number_in(value) <= most:
                return cls("poisson", float(value))
            case "trace[:SCALE]" if least <= number_in(value) <= most:
                return cls("trace", float(value))
        words = "; ".join(said for name, said in _WORDS.items() if name in forms)
        raise ConfigError(
            f"--arrivals: {text!r} is unknown; write {' or '.join(forms.split('|'))}: {words}"
        )

    def __str__(self) -> str:
        return f"{self.kind}:{self.value:g}" if self.value else self.kind
