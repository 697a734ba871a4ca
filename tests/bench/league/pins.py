"""The peers' versions, from ``peers.toml``."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Peer:
    """A product.

    Attributes:
        packages: name and version of what pip installs, the product first; empty: it is not
            started.
        url: of its source.
        cannot: why it is not started.
    """

    url: str
    packages: tuple[str, ...] = ()
    cannot: str = ""

    @property
    def package(self) -> str:
        """The product itself."""
        return self.packages[0]


def _read() -> dict[str, Peer]:
    text = Path(__file__).with_name("peers.toml").read_text(encoding="utf-8")
    return {
        name: Peer(**{**fields, "packages": tuple(fields.get("packages", ()))})
        for name, fields in tomllib.loads(text).items()
    }


PEERS = _read()
