"""A measurement in parts: its command line, and a file that keeps each part as soon as it is there.

Time on a GPU may be short. Called again with the same file and settings, a script measures what is
missing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from tests.gpu.serving import SHAPES, Machine

Values = Mapping[str, Any]
"""By name."""

_STATE = ("settings", "machine", "calls", "parts")


class OtherConditionsError(Exception):
    """Parts that do not belong together; the message says why, and what to do."""


def nothing(_parts: Mapping[str, Values]) -> tuple[Values, Values]:
    """No figures besides the parts."""
    return {}, {}


class Parts:
    """What has been measured so far, in a file that is whole at any moment.

    Args:
        file: with the parts of an earlier call, or not there yet.
        settings: what all parts must have in common; JSON.
        figures: found from the parts; those at the head of the file, and those beside the parts.

    Raises:
        OtherConditionsError: the file's parts have other settings, or it is another kind of file.
    """

    def __init__(
        self,
        file: Path,
        settings: Values,
        figures: Callable[[Mapping[str, Values]], tuple[Values, Values]] = nothing,
    ) -> None:
        self._file = file
        self._figures = figures
        self._state: dict[str, Any] = {
            "settings": json.loads(json.dumps(settings)),
            "machine": None,
            "calls": [],
            "parts": {},
        }
        if file.exists():
            self._state = self._go_on(_read(file))

    def of(self, kind: str) -> Values:
        """The parts of one kind."""
        found: Values = self._state["parts"].get(kind, {})
        return found

    def missing(self, kind: str, names: Iterable[str]) -> list[str]:
        """Those that have yet to be measured."""
        return [name for name in names if name not in self.of(kind)]

    def begin(self, machine: Values) -> None:
        """Parts come from here now.

        Raises:
            OtherConditionsError: earlier ones came from elsewhere.
        """
        if self._state["machine"] is not None:
            self._refuse_others("machine", machine)
        self._state["machine"] = machine
        command = shlex.join(["python", *map(_told, sys.argv)])
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._state["calls"].append({"date": now, "command": command})

    def keep(self, kind: str, name: str, value: object) -> None:
        """Write the file with one part more."""
        self._state["parts"].setdefault(kind, {})[name] = value
        head, beside = self._figures(self._state["parts"])
        content = {**head, "measured": {**beside, **self._state}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_name(f".{self._file.name}.draft")
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        draft.replace(self._file)
        sys.stderr.write(f"{kind}, {name}: {value}\n")

    def _go_on(self, found: Any) -> dict[str, Any]:
        try:
            earlier = {key: found["measured"][key] for key in _STATE}
        except (KeyError, TypeError) as error:
            raise OtherConditionsError(
                f"{self._file} holds no parts of a measurement; name another file with --out"
            ) from error
        wanted, self._state = self._state["settings"], earlier
        self._refuse_others("settings", wanted)
        return earlier

    def _refuse_others(self, key: str, wanted: Values) -> None:
        earlier = self._state[key]
        other = [
            f"{name} is {wanted.get(name)}, was {earlier.get(name)}"
            for name in sorted({*wanted, *earlier})
            if wanted.get(name) != earlier.get(name)
        ]
        if other:
            raise OtherConditionsError(
                f"{self._file} holds parts of another {key.removesuffix('s')}: {'; '.join(other)}. "
                "Measure as before, or name another file with --out"
            )


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None


def _told(argument: str) -> str:
    """A path of this machine alone is of no use to others."""
    return Path(argument).name if Path(argument).is_absolute() else argument


# --- the command line -----------------------------------------------------------------------------


def options(description: str) -> argparse.ArgumentParser:
    """The part of it that says where engines run, and where parts are kept."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="with vLLM")
    parser.add_argument("--cpu", action="store_true", help="the CPU engine of `make engine`")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--engine-flags", default="", help="further ones of vllm serve, one text")
    parser.add_argument("--out", type=Path, required=True, help="goes on with the parts in it")
    return parser


def measure_with(
    parser: argparse.ArgumentParser,
    measure: Callable[[Machine, argparse.Namespace], None],
) -> None:
    """Measure as the command line says; what runs is ended when this process is told to end."""
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory(prefix="evenstep-gpu-") as folder:
        flags = tuple(shlex.split(given.engine_flags))
        where = Machine(given.python, given.shape, given.cpu, flags, Path(folder))
        try:
            measure(where, given)
        except OtherConditionsError as error:
            parser.error(str(error))
    sys.stdout.write(f"{given.out}\n")


def _leave(number: int, _frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
