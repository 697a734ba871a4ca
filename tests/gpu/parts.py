"""A measurement in parts: its command line, and a file that keeps each part as soon as it is there.

Time on a GPU may be short. Called again with the same file and settings, a script measures what is
missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from loadgen.report.origin import KEY, Engines, commit, origin
from tests.gpu.serving import DENSE, ROOT, Machine, cpu_python, gpus_there, has_vllm

Values = Mapping[str, Any]
"""By name."""

LIMIT_S = 560.0
"""Of one call; with the end of its engines it stays below ten minutes."""

INCOMPLETE = 3
"""Exit status while something is missing."""

_END_S = 40.0
_MOST_S = 86400.0
CODE = ("engine_patches", "router/core", "tests/gpu")
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
        self._header: dict[str, dict[str, Any]] = {}
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

    def unknown(self, kind: str, names: Iterable[str]) -> list[str]:
        """Those that are missing, or were measured and not found."""
        return [name for name in names if self.of(kind).get(name) is None]

    def begin(self, machine: Values, commit: str) -> None:
        """Note the machine, and the commit of the code that measures the next parts.

        Raises:
            OtherConditionsError: earlier ones came from elsewhere.
        """
        if self._state["machine"] is not None:
            self._refuse_others("machine", machine)
        self._state["machine"] = machine
        self._header = {KEY: {**origin(Engines.REAL, CODE), "commit": commit}}
        call = {key: self._header[KEY][key] for key in ("date", "commit", "command")}
        self._state["calls"].append(call)

    def keep(self, kind: str, name: str, value: object) -> None:
        """Write the file with one part more."""
        self._state["parts"].setdefault(kind, {})[name] = value
        head, beside = self._figures(self._state["parts"])
        content = {**head, "measured": {**self._header, **beside, **self._state}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_name(f".{self._file.name}.draft")
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        draft.replace(self._file)
        say(f"{kind}, {name}: {value}")

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


class Budget:
    """Time for the parts of one call, one after another: what one leaves is the next one's.

    Args:
        limit_s: of the call, from now on.
        shares: of each part, in their order; 1 together.
        clock: seconds.
    """

    def __init__(
        self,
        limit_s: float,
        shares: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ends_s: dict[str, float] = {}
        began_s, sum_ = clock(), 0.0
        for part, share in shares.items():
            sum_ += share
            self._ends_s[part] = began_s + sum_ * max(0.0, limit_s - _END_S)

    def left_s(self, part: str) -> float:
        """Until the end of its share."""
        return self._ends_s[part] - self._clock()

    def within(self, part: str, names: Iterable[str]) -> Iterator[str]:
        """Some things of a part, while there is time for another one."""
        for name in names:
            if self.left_s(part) <= 0:
                return
            yield name


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None


# --- the command line -----------------------------------------------------------------------------


def options(
    doc: str | None, shapes: tuple[str, str] = DENSE, named: str = ""
) -> argparse.ArgumentParser:
    """The part of it that says where engines run, for how long, and where parts are kept.

    Args:
        doc: of the script.
        shapes: of the model on a GPU, and in a dry run.
        named: of several scripts, this one.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.gpu {named}".rstrip(),
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", type=Path, help="interpreter that has vLLM (default: this one)")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="small sizes on the CPU engine of `make engine`; without it, too, where there is no "
        "GPU, unless several are needed",
    )
    parser.add_argument("--shape", choices=shapes, default=shapes[0])
    parser.set_defaults(small_shape=shapes[1], ranks=1, model=None)
    parser.add_argument("--engine-flags", default="", help="further ones of vllm serve, one text")
    parser.add_argument("--out", type=Path, help="folder for the results; measures what it lacks")
    parser.add_argument(
        "--limit-s",
        type=_limit_s,
        default=LIMIT_S,
        help="seconds for this call (default: %(default)g)",
    )
    parser.add_argument("--commit", help="commit of the measured code, where git cannot tell it")
    return parser


def names_of(
    known: Collection[str], *, files: bool = False, several: bool = True
) -> Callable[[str], str]:
    """Type of an argument that takes these names, or paths of files; ``several`` with commas."""

    def checked(text: str) -> str:
        for one in text.split(",") if several else [text]:
            if one not in known and not (files and Path(one).is_file()):
                wanted = ", ".join(sorted(known)) + ", or a file" * files
                raise argparse.ArgumentTypeError(f"{one!r} should be one of {wanted}")
        return text

    return checked


def _limit_s(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= _MOST_S:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} should be seconds: above 0, a day at most")


def measure_with(
    parser: argparse.ArgumentParser,
    measure: Callable[[Machine, argparse.Namespace], list[str]],
) -> NoReturn:
    """Measure as the command line says; what runs is ended with this process, or after the limit.

    Args:
        parser: made by ``options``.
        measure: measures what is missing, and returns what is missing still.
    """
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGALRM, _leave)
    signal.setitimer(signal.ITIMER_REAL, given.limit_s)
    try:
        missing = _measure(parser, measure, given)
    except SystemExit as leaving:
        if leaving.code != 128 + signal.SIGALRM:
            raise
        missing = ["the parts for which there was no time"]
    if missing:
        say(f"missing: {', '.join(missing)}; give the same command again to go on")
    raise SystemExit(INCOMPLETE if missing else 0)


def _measure(
    parser: argparse.ArgumentParser,
    measure: Callable[[Machine, argparse.Namespace], list[str]],
    given: argparse.Namespace,
) -> list[str]:
    where = _where(parser, given)
    if where.cpu:
        say("DRY RUN on the CPU engine, with a tiny model: none of its figures is a GPU's")
    say(f"parts go to {given.out}")
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        return measure(where, given)
    except OtherConditionsError as error:
        parser.error(str(error))


def say(text: str) -> None:
    """Write a line for the user at the terminal."""
    sys.stderr.write(f"{text}\n")


def _where(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Machine:
    """The machine, with all that is needed there; ``given`` gets the defaults that it decides."""
    gpus = 0 if given.dry_run else gpus_there()
    if gpus < given.ranks > 1 and not given.dry_run:
        parser.error(
            f"{given.ranks} ranks need a GPU each, and engines see {gpus} here: name fewer with "
            "--ranks, look at nvidia-smi -L and CUDA_VISIBLE_DEVICES, or try it with --dry-run"
        )
    cpu = not gpus
    if cpu and given.model:
        parser.error("a dry run has a tiny model of its own: leave out --model")
    python = given.python or (cpu_python() if cpu else Path(sys.executable))
    if python is None:
        parser.error("there is no GPU here, and no CPU engine for a dry run: run make engine")
    if not has_vllm(python):
        parser.error(f"{python} has no vLLM: name an interpreter that does with --python")
    given.out = given.out or ROOT / ("out/gpu-dry-run" if cpu else "tests/data/gpu")
    given.commit = given.commit or commit()
    flags = tuple(shlex.split(given.engine_flags))
    shape = given.small_shape if cpu else given.shape
    rest = (flags, given.out, given.commit, given.ranks, given.model)
    return Machine(python, shape, cpu, *rest)


def _leave(number: int, _frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
