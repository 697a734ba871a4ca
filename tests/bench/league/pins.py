"""The peers' versions, from ``peers.toml``, and an environment for each of them."""

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from deploy.engine.build import cache_folder, ensure, is_complete, run


@dataclass(frozen=True, slots=True)
class Peer:
    """A product.

    Attributes:
        packages: name and version of what is installed, the product first; empty: it is not
            started.
        url: of its source.
        cannot: why it is not started.
        pip: arguments of each ``pip install``, in their order; empty: the packages.
    """

    url: str
    packages: tuple[str, ...] = ()
    cannot: str = ""
    pip: tuple[tuple[str, ...], ...] = ()

    @property
    def package(self) -> str:
        """The product itself."""
        return self.packages[0]

    @property
    def environment(self) -> Path:
        """Where it is installed, or would be: another place once any of its pins is another one."""
        return cache_folder() / "-".join(("peer", *self.packages)).replace("==", "-")

    @property
    def installed(self) -> bool:
        """Whether it is there."""
        return is_complete(self.environment)

    @property
    def libraries(self) -> Path:
        """Where its environment has Python's packages."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.environment / "lib" / version / "site-packages"

    def install(self) -> Path:
        """Its environment, made if it is not there.

        Raises:
            BuildError: it cannot be installed.
        """

        def make(folder: Path) -> None:
            venv = [sys.executable, "-m", "venv", str(folder)]
            run(venv, f"{folder} cannot be made: is ensurepip there?")
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-input"]
            for arguments in self.pip or (self.packages,):
                run([*pip, *arguments], f"{arguments[-1]} cannot be installed")

        ensure(self.environment, make)
        return self.environment


def _read() -> dict[str, Peer]:
    text = Path(__file__).with_name("peers.toml").read_text(encoding="utf-8")
    return {
        name: Peer(
            fields["url"],
            tuple(fields.get("packages", ())),
            fields.get("cannot", ""),
            tuple(map(tuple, fields.get("pip", ()))),
        )
        for name, fields in tomllib.loads(text).items()
    }


PEERS = _read()
