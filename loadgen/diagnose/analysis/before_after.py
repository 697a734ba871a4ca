"""A diagnosis made before a policy switch, compared with a measurement made after it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from loadgen.diagnose.analysis.findings import Figures, Findings
from router.core.errors import InputError

# Request means differ by chance; a larger difference means that the load has changed.
SAME_LOAD = 0.15
_LOAD = {
    "workers": "workers",
    "prompt_tokens": "mean prompt, tokens",
    "output_tokens": "mean output, tokens",
    "inside": "requests in the system",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One figure: measured earlier, predicted for the policy in force now, and measured now."""

    before: float
    predicted: float
    measured: float

    @property
    def predicted_gain(self) -> float:
        return self.predicted - self.before

    @property
    def measured_gain(self) -> float:
        return self.measured - self.before

    @property
    def gain_error(self) -> float | None:
        """Predicted gain / measured gain - 1; None if nothing has changed."""
        return self.predicted_gain / self.measured_gain - 1 if self.measured_gain else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures of a policy, before and after the switch."""

    # before, policy: before the switch (None: unknown), and now.
    before: str | None
    policy: str
    changes: Mapping[str, Change]  # by field name of ``Figures``
    # Sentences on load changes beyond chance; the prediction assumed the earlier load.
    load: tuple[str, ...]


def compare(
    earlier: Mapping[str, Any], found: Findings, in_force: tuple[str, str] | None, name: str
) -> Comparison:
    """Compare a prediction with the present measurement.

    InputError: the file is no diagnosis, it predicted nothing for this policy, or the present
    measurement has no figures.

    ``earlier`` is what ``evenstep diagnose --json`` wrote to the file ``name`` before the switch;
    policy and dispatch ``in_force``, if they are unknown, are taken to be the advised ones.
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
        then, load = earlier["load"], asdict(found.load)
        changed = tuple(
            f"{text}: {then[key]:,.0f} then, {load[key]:,.0f} now"
            for key, text in _LOAD.items()
            if then[key] and load[key] and abs(load[key] / then[key] - 1) > SAME_LOAD
        )
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
    return Comparison(old_policy, ", ".join(key), changes, changed)
