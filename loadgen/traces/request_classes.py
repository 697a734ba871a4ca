"""Classes of requests, each with targets of its own or none, and which request is of which."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose

from router.core.errors import ConfigError
from router.core.step_time import number_in
from router.core.targets import Targets

FORM = "NAME:SHARE[:TTFT[:TPOT]],..."


@dataclass(frozen=True, slots=True)
class RequestClass:
    """``share`` of the requests; without ``targets`` each counts once it completes."""

    name: str
    share: float
    targets: Targets | None = None

    def __str__(self) -> str:
        wanted = self.targets or Targets()
        times = ("" if s is None else f"{s:g}" for s in (wanted.ttft_s, wanted.tpot_s))
        return ":".join((self.name, f"{self.share:g}", *times)).rstrip(":")


ALL = RequestClass("", 1.0)  # where no classes are told


def parse_classes(text: str) -> tuple[RequestClass, ...]:
    """Parse ``chat:.5:1:.04,agents:.3:3,batch:.2``: share, TTFT and TPOT in seconds.

    Raises:
        ConfigError: another form, a name twice, or shares whose sum is not 1.
    """
    classes = tuple(_parse(each.strip()) for each in text.split(","))
    if len({each.name for each in classes}) < len(classes):
        raise ConfigError(f"--classes: a name stands twice in {text!r}")
    if not isclose(whole := sum(each.share for each in classes), 1, abs_tol=1e-6):
        raise ConfigError(f"--classes: the shares make {whole:g}, not 1")
    return classes


def deal(classes: Sequence[RequestClass], requests: int, seed: int) -> list[RequestClass]:
    """Class of each request, at random by the shares; equal seeds deal alike."""
    if not classes:
        return [ALL] * requests
    rng = random.Random(f"classes {seed}")
    return rng.choices(classes, [each.share for each in classes], k=requests)


def _parse(text: str) -> RequestClass:
    name, *numbers = text.split(":")
    values = [number_in(each) if each else None for each in (*numbers, "", "", "")]
    share, ttft_s, tpot_s, *_ = values
    if not name or not 1 <= len(numbers) <= 3 or share is None or not 0 < share <= 1:
        raise ConfigError(f"--classes takes {FORM} with shares above 0 and up to 1, got {text!r}")
    if ttft_s is None and tpot_s is None:
        return RequestClass(name, share)
    try:
        return RequestClass(name, share, Targets(ttft_s, tpot_s))
    except ConfigError as error:
        raise ConfigError(f"--classes: {text!r}: {error}") from error
