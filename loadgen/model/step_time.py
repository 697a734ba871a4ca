"""Cost of a step of barrier-synchronized workers: time and power.

In the plain barrier model (arXiv 2601.17855, section 2) a step takes ``C + t_l * max_g L_g``. A
cost per running request and slower workers generalize it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine_patches.admission.theory.fluid import StepCost
from router.core.errors import ConfigError, InputError
from router.core.forecast.forecast import Floats

Share = TypeVar("Share", float, Floats)

# Keys of a measurement's file.
_COSTS = ("base_s", "per_token_s", "per_request_s")
_PROMPT_COST = "per_prompt_token_s"
_MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step.

    Attributes:
        base_s: C, fixed time of any step, seconds.
        per_token_s: t_l, seconds per resident KV token.
        per_request_s: t_r, seconds per running request.
    """

    base_s: float = 4.95e-3
    per_token_s: float = 9.5e-8
    per_request_s: float = 0.0

    def seconds(self, load_tokens: int, requests: int, speed: float = 1.0) -> float:
        """Time that one worker needs; half the speed takes twice as long."""
        work_s = self.base_s + self.per_token_s * load_tokens + self.per_request_s * requests
        return work_s / speed


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Power of one worker by its utilization u = L_g / max L (arXiv 2601.17855)."""

    idle_w: float = 100.0
    max_w: float = 400.0
    exponent: float = 0.7

    def watts(self, utilization: Share) -> Share:
        """``P_idle + (P_max - P_idle) * u ** exponent``; u is from 0 to 1."""
        watts: Share = self.idle_w + (self.max_w - self.idle_w) * utilization**self.exponent
        return watts


def parse_step_time(text: str) -> StepTime:
    """Parse ``C,t_l[,t_r]`` in seconds.

    Raises:
        ConfigError: not two or three numbers, or a step that takes no time.
    """
    values = numbers("--step-time", text)
    if len(values) not in (2, 3) or min(values) < 0 or values[0] == 0:
        raise ConfigError(f"--step-time takes C,t_l[,t_r] in seconds with C above 0, got {text!r}")
    return StepTime(*values)


def load_step_time(text: str) -> StepTime:
    """Parse ``C,t_l[,t_r]``, or read the file of a measurement.

    Args:
        text: numbers, or the path of a JSON object with ``base_s`` and ``per_token_s``. Optional
            keys: ``per_request_s``; ``per_prompt_token_s``, which is ignored here; ``measured`` for
            any further data, as ``tests/gpu/measure.py`` writes it.

    Raises:
        ConfigError: neither an existing file nor two or three numbers.
        InputError: the file is no such object.
    """
    if not _is_file(Path(text)) and _begins_with_a_number(text):
        return parse_step_time(text)
    base_s, per_token_s, per_request_s, _ = _measured_costs(text)
    return StepTime(base_s, per_token_s, per_request_s)


def _measured_costs(text: str) -> list[float]:
    path = Path(text)
    if not _is_file(path):
        raise ConfigError(
            f"--step-time: {text!r} is no file that is there, and not C,t_l[,t_r] in seconds "
            "either, such as 4.95e-3,9.5e-8"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--step-time: {text} cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise InputError(f"--step-time: {text} is no JSON object with base_s and per_token_s")
    if unknown := found.keys() - {*_COSTS, _PROMPT_COST, _MEASURED}:
        mean = "means" if len(unknown) == 1 else "mean"
        raise InputError(
            f"--step-time: {text} has {', '.join(sorted(unknown))}, which {mean} nothing here; "
            f"it may have {', '.join(_COSTS)} (seconds), and all else inside {_MEASURED}"
        )
    values = [_seconds(text, found, key) for key in (*_COSTS, _PROMPT_COST)]
    if values[0] == 0:
        raise InputError(f"--step-time: base_s in {text} must be above 0")
    return values


def load_step_cost(text: str) -> StepCost:
    """Like ``load_step_time``, with a cost per prompt token as a fourth number.

    Raises:
        ConfigError, InputError: as in ``load_step_time``.
    """
    if _begins_with_a_number(text) and not _is_file(Path(text)):
        return parse_step_cost(text)
    return StepCost(*_measured_costs(text))


def parse_step_cost(text: str) -> StepCost:
    """Parse ``d0,d1[,db[,dp]]`` in seconds.

    Raises:
        ConfigError: not two to four numbers, or a step that takes no time.
    """
    values = numbers("--step-time", text)
    if not 2 <= len(values) <= 4 or min(values) < 0 or values[0] == 0:
        raise ConfigError(
            f"--step-time takes d0,d1[,db[,dp]] in seconds with d0 above 0, got {text!r}"
        )
    return StepCost(*values)


def _begins_with_a_number(text: str) -> bool:
    try:
        float(text.partition(",")[0])
    except ValueError:
        return False
    return True


def _seconds(file: str, found: dict[str, object], key: str) -> float:
    value = found.get(key, 0.0 if key in ("per_request_s", _PROMPT_COST) else None)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:  # type: ignore[operator]
        raise InputError(
            f"--step-time: {key} in {file} must be a number of seconds from 0 up, "
            f"got {json.dumps(value)}"
        )
    return float(value)  # type: ignore[arg-type]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False


def numbers(option: str, text: str) -> list[float]:
    """Parse finite numbers separated by commas.

    Raises:
        ConfigError: other text; names the option.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers separated by commas, got {text!r}") from error
    if not all(map(math.isfinite, values)):
        raise ConfigError(f"{option} takes finite numbers, got {text!r}")
    return values
