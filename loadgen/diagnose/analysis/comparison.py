"""After a switch: what an earlier diagnosis predicted, against what is measured now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from loadgen.diagnose.analysis.findings import Figures, Findings
from router.core.errors import InputError

# Requests are the same in their means up to chance; beyond this the load has changed.
SAME_LOAD = 0.15


@dataclass(frozen=True, slots=True)
class Change:
    """One figure.

    Attributes:
        before: measured by the earlier diagnosis.
        predicted: by it, of the policy that is in force now.
        measured: now.
    """

    before: float
    predicted: float
    measured: float

    @property
    def predicted_gain(self) -> float:
        """What was to change."""
        return self.predicted - self.before

    @property
    def measured_gain(self) -> float:
        """What has changed."""
        return self.measured - self.before

    @property
    def gain_error(self) -> float | None:
        """Predicted gain / measured gain - 1; None: nothing has changed."""
        return self.predicted_gain / self.measured_gain - 1 if self.measured_gain else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every figure of a policy, before and after.

    Attributes:
        before, policy: the policy of then (None: unknown) and of now.
        changes: by the names of ``Figures``.
        load: what else has changed by more than chance, in words: the prediction was for another
            load then.
    """

    before: str | None
    policy: str
    changes: Mapping[str, Change]
    load: tuple[str, ...]


def compare(
    earlier: Mapping[str, Any], found: Findings, in_force: tuple[str, str] | None, name: str
) -> Comparison:
    """Prediction against measurement.

    Args:
        earlier: what ``evenstep diagnose --json`` wrote before the switch.
        found: now.
        in_force: policy and dispatch of now; None: unknown, and taken to be what was advised.
        name: of the earlier one's file.

    Raises:
        InputError: no diagnosis, none that predicted anything of this policy, or nothing was
            measured now to compare with.
    """
    now = found.waiting.figures
    if now is None:
        raise InputError(
            "--before: there is nothing to compare with: how much of a step is waiting is not "
            "known now; record longer"
        )
    if "verdict" in earlier and not earlier.get("policies"):
        raise InputError(
            f"--before: {name} predicts nothing, since nothing was simulated then: its verdict is "
            f"{earlier['verdict']}"
        )
    try:
        advised = earlier["advice"]
        rows = {(row["policy"], row["dispatch"]): row["predicted"] for row in earlier["policies"]}
        key = in_force or (str(advised["policy"]), str(advised["dispatch"]))
        before = Figures(**{each.name: earlier["waiting"][each.name] for each in fields(Figures)})
        load = _changed(earlier["load"], asdict(found.load))
        predicted = Figures(**rows[key]) if key in rows else None
        old_policy = earlier["conditions"]["policy"]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"--before: {name} predicts nothing ({error!s:.80}); give a file that evenstep "
            "diagnose --json wrote with a table of policies"
        ) from error
    if predicted is None:
        raise InputError(
            f"--before: {name} predicted nothing of {key[0]}, {key[1]}; it did of "
            f"{'; '.join(map(', '.join, rows))}"
        )
    changes = {
        each.name: Change(*(getattr(of, each.name) for of in (before, predicted, now)))
        for each in fields(Figures)
    }
    return Comparison(old_policy, ", ".join(key), changes, load)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    words = {
        "workers": "workers",
        "prompt_tokens": "mean prompt, tokens",
        "output_tokens": "mean output, tokens",
        "inside": "requests in the system",
    }
    return tuple(
        f"{text}: {before[key]:,.0f} then, {now[key]:,.0f} now"
        for key, text in words.items()
        if before[key] and now[key] and abs(now[key] / before[key] - 1) > SAME_LOAD
    )
