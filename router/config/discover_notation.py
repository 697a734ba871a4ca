"""Where workers are found, in the user's notation: ``KIND:WHERE[,key=value]...``."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.config.worker_notation import parse_worker, unknown
from router.core.errors import ConfigError
from router.core.types import WorkerSpec
from router.core.worker_specs import authority

_NAMES = r"([\w.-]+)/([\w.-]+)"
# What the text after each kind looks like.
_WHERE = {
    "endpointslices": (_NAMES, "NAMESPACE/SERVICE"),
    "lws": (_NAMES, "NAMESPACE/NAME"),
    "file": (r"(.+)()", "PATH"),
    "dns": (r"(\S+):(\d+)", "HOST:PORT"),
}
# A port alone is that of a pod's first rank; so far apart are those of its ranks.
_APART = {"snapshots": 2, "kv_events": 1, "kv_replay": 1, "power": 0}


@dataclass(frozen=True, slots=True)
class Discover:
    """A source, and what the workers at each of its addresses are.

    Attributes:
        where: namespace and name, host and port, or a path.
        ports: numbers, one for each rank; empty: as the source says.
        shared_ranks: ranks behind one port.
        options: of each worker, as after ``--worker``.
    """

    kind: str
    where: tuple[str, str]
    ports: Sequence[int]
    shared_ranks: int
    options: Mapping[str, str]

    def workers(
        self, host: str, ports: Sequence[int], first_rank: int | None = None, **fields: object
    ) -> list[WorkerSpec]:
        """At one address; ConfigError: they cannot be. With one port alone they have no rank."""
        ports = self.ports or ports
        places = [(port, i) for port in ports for i in range(self.shared_ranks)]
        found = []
        for place, (port, _) in enumerate(places):
            table: dict[str, object] = {"url": f"http://{authority(host, port)}", **fields}
            if len(places) > 1 or first_rank is not None:
                table["rank"] = (first_rank or 0) * len(places) + place
            for key, value in self.options.items():
                table[key] = value
                if key in _APART and value.isdigit():
                    table[key] = f"tcp://{host}:{int(value) + _APART[key] * place}"
            found.append(parse_worker(table))
        return found


def parse_discover(text: str) -> Discover:
    """Parse a text; a ConfigError says what is wrong."""
    place, *items = text.split(",")
    kind, _, rest = place.partition(":")
    if kind not in _WHERE:
        raise ConfigError(f"discover {text!r}: {unknown('source', kind, _WHERE)}")
    pattern, form = _WHERE[kind]
    if (where := re.fullmatch(pattern, rest)) is None:
        raise ConfigError(f"discover {text!r} should be {kind}:{form}[,key=value]...")
    options = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or key in ("url", "id", "rank"):
            raise ConfigError(f"discover {text!r}: {item!r} is no key=value of all its workers")
        options[key] = value
    first, ranks, shared = (
        _number(text, key, options.pop(key, None)) for key in ("port", "ranks", "shared_ranks")
    )
    if ranks is not None and first is None:
        raise ConfigError(f"discover {text!r}: ranks=N needs port=N, that of the first one")
    ports = () if first is None else range(first, first + (ranks or 1))
    source = Discover(kind, (where[1], where[2]), ports, shared or 1, options)
    if kind == "file" and (items or not rest.endswith((".toml", ".json"))):
        raise ConfigError(f"discover {text!r} should be file:PATH of a .toml or .json, no more")
    source.workers("127.0.0.1", [8000])  # are the options those of workers?
    return source


def _number(text: str, key: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit() or not 0 < int(value) < 65_536:
        raise ConfigError(f"discover {text!r}: {key}={value} should be a number from 1 to 65535")
    return int(value)
