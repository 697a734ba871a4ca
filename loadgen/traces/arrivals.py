"""When requests arrive: one notation for the replay and both simulators."""

import re
from dataclasses import dataclass
from typing import Literal, Self, cast

from router.core.errors import ConfigError
from router.core.step_time import number_in

Kind = Literal["full", "poisson", "trace", "closed"]
_RATES = (1e-9, 1e6)
_LIMITS: dict[str, tuple[float, float]] = {
    "poisson": _RATES,
    "trace": _RATES,
    "closed": (1, 1_000_000_000),
}
_MEANT = {
    "RATE": f"RATE in requests per engine second, from {_RATES[0]:g} to {_RATES[1]:g}",
    "SCALE": "SCALE a factor on the trace's times",
    "N": "N a number of clients",
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Times at which requests arrive, or with sessions their first turns."""

    # full: a constant number of waiting requests; poisson: a rate, independent of the answers;
    # trace: the trace's own times; closed: clients that each wait for their answer.
    kind: Kind = "full"
    # Requests per engine second of poisson; factor on the trace's times, 0: as they are; clients.
    value: float = 0.0

    @classmethod
    def parse(cls, text: str, forms: str) -> Self:
        """Parse one of a command's forms, such as ``full|poisson:RATE|trace[:SCALE]|closed:N``."""
        alone = re.findall(r"([a-z]+)(?=\[|\||$)", forms)
        numbered = re.findall(r"([a-z]+)\[?:", forms)
        kind, colon, value = text.partition(":")
        if not colon and kind in alone:
            return cls(cast(Kind, kind), float(kind in numbered))
        if colon and kind in numbered and (kind != "closed" or value.isdecimal()):
            least, most = _LIMITS[kind]
            if least <= (number := number_in(value)) <= most:
                return cls(cast(Kind, kind), number)
        meant = ", ".join(meaning for name, meaning in _MEANT.items() if name in forms)
        raise ConfigError(f"--arrivals: {text!r} is unknown; write {forms}: {meant}")

    def __str__(self) -> str:
        return f"{self.kind}:{self.value:g}" if self.value else self.kind
