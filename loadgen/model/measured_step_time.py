"""The step time of the command line: numbers, or the file of a measurement."""

import json
from pathlib import Path

from router.core.errors import ConfigError, InputError
from router.core.step_time import MOST_S, StepTime

# Keys of a measurement's file.
_NEEDED = ("base_s", "per_token_s")
_COSTS = (*_NEEDED, "per_request_s", "per_prompt_token_s")
_MEASURED = "measured"


def load_step_time(text: str) -> StepTime:
    """Parse ``C,t_l[,t_r[,t_p]]``, or read the file of a measurement.

    The file holds a JSON object with ``_NEEDED`` and others of ``_COSTS``, and ``measured``
    for any further data, as ``tests/gpu/measure.py`` writes it.
    """
    path = Path(text)
    if _is_file(path):
        return _measured(text)
    try:
        float(text.partition(",")[0])
    except ValueError as error:
        raise ConfigError(
            f"--step-time: {text!r} is no file that is there, and not C,t_l[,t_r[,t_p]] in seconds "
            "either, such as 4.95e-3,9.5e-8"
        ) from error
    return StepTime.parse(text)


def _measured(file: str) -> StepTime:
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--step-time: {file} cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise InputError(f"--step-time: {file} is no JSON object with base_s and per_token_s")
    if unknown := found.keys() - {*_COSTS, _MEASURED}:
        mean = "means" if len(unknown) == 1 else "mean"
        raise InputError(
            f"--step-time: {file} has {', '.join(sorted(unknown))}, which {mean} nothing here; "
            f"it may have {', '.join(_COSTS)} (seconds), and all else inside {_MEASURED}"
        )
    time = StepTime(*(_seconds(file, found, key) for key in _COSTS))
    if time.base_s == 0:
        raise InputError(f"--step-time: base_s in {file} must be above 0")
    return time


def _seconds(file: str, found: dict[str, object], key: str) -> float:
    value = found.get(key, None if key in _NEEDED else 0.0)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MOST_S:  # type: ignore[operator]
        raise InputError(
            f"--step-time: {key} in {file} must be a number of seconds from 0 to "
            f"{MOST_S:g}, got {json.dumps(value)}"
        )
    return float(value)  # type: ignore[arg-type]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False
