"""Diagnosis of a recording: findings, verdict, prospects, energy, and all of it as JSON."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from loadgen.diagnose.analysis.before_after import Comparison
from loadgen.diagnose.analysis.findings import Findings, findings
from loadgen.diagnose.analysis.prospects import Prospect, Prospects
from loadgen.diagnose.analysis.verdict import Verdict, Word, final_verdict, first_verdict
from loadgen.diagnose.analysis.window import Window
from loadgen.diagnose.energy_per_day import Energy, energy
from loadgen.diagnose.simulated import prospects
from router.core.policies.policy_table import POLICIES

SCHEMA = 1
EXTRAPOLATED = "what a day of minutes like this one would come to"


@dataclass(frozen=True, slots=True, eq=False)
class Diagnosis:
    """Result for one window."""

    window: Window
    found: Findings
    verdict: Verdict
    # None if simulation is needless or impossible; ``verdict`` gives the reason.
    prospects: Prospects | None
    energy: Energy | None  # None without steps

    @property
    def advice(self) -> Prospect | None:
        """None if no switch would pay."""
        if self.prospects is None or self.verdict.word is not Word.BALANCING_PAYS:
            return None
        return self.prospects.best

    @property
    def extra_tok_s(self) -> float | None:
        """Of the advised policy; None without advice."""
        if self.advice is None:
            return None
        return self.advice.predicted.throughput_tok_s - self.found.waiting.throughput_tok_s

    @property
    def simulation_error(self) -> dict[str, float] | None:
        """Simulated / measured - 1 for the policy in force; None: unknown."""
        current = None if self.prospects is None else self.prospects.current
        measured = self.found.waiting.figures
        if current is None or measured is None:
            return None
        simulated, seen = asdict(current.simulated), asdict(measured)
        return {name: simulated[name] / seen[name] - 1 for name in seen if seen[name]}


def diagnose_window(
    window: Window,
    price_per_kwh: float | None = None,
    policies: Collection[str] = tuple(POLICIES),
    seed: int = 0,
) -> Diagnosis:
    """Diagnose a window; the result is deterministic."""
    found = findings(window)
    verdict, seen = first_verdict(found), None
    if verdict is None:
        seen = prospects(window, found, policies, seed)
        verdict = final_verdict(found, seen)
    advised = seen if verdict.word is Word.BALANCING_PAYS else None
    return Diagnosis(window, found, verdict, seen, energy(window, found, advised, price_per_kwh))


def report(diagnosis: Diagnosis, compared: Comparison | None = None) -> dict[str, Any]:
    """The diagnosis as JSON-able values; null for unknown ones."""
    window, found, seen = diagnosis.window, diagnosis.found, diagnosis.prospects
    advice, used = diagnosis.advice, diagnosis.energy
    return {
        "diagnosis": SCHEMA,
        "verdict": diagnosis.verdict.word.value,
        "reasons": list(diagnosis.verdict.reasons),
        "conditions": {
            "source": window.source,
            "group": window.group,
            "other_groups": list(window.others),
            "policy": window.policy,
            "dispatch": window.dispatch.value if window.dispatch else None,
            "policy_changes": [
                asdict(each) | {"dispatch": each.dispatch.value if each.dispatch else None}
                for each in window.changes
            ],
            "seconds": window.elapsed_s,
            "time_scale": window.time_scale,
            "steps": window.steps,
            "complete": window.complete,
        },
        "barrier": asdict(found.barrier),
        "waiting": asdict(found.waiting),
        "load": asdict(found.load),
        "memory": asdict(found.memory),
        "caches": asdict(found.caches),
        "simulation": seen and {"mode": seen.mode, "requests": seen.requests, "steps": seen.steps},
        "simulation_error": diagnosis.simulation_error,
        "policies": [
            asdict(each) | {"dispatch": each.dispatch.value} for each in (seen.all if seen else ())
        ],
        "advice": advice and {"policy": advice.policy, "dispatch": advice.dispatch.value},
        "extra_tok_s": diagnosis.extra_tok_s,
        "energy": None
        if used is None
        else asdict(used)
        | {
            "per_day_is": EXTRAPOLATED,
            "per_day_cost": used.money(used.per_day_j),
            "waiting_per_day_cost": used.money(used.waiting_per_day_j),
            "saved_per_day_cost": used.money(used.saved_per_day_j),
        },
        "comparison": compared
        and {
            "before": compared.before,
            "policy": compared.policy,
            "changes": {
                name: asdict(each)
                | {
                    "predicted_gain": each.predicted_gain,
                    "measured_gain": each.measured_gain,
                    "gain_error": each.gain_error,
                }
                for name, each in compared.changes.items()
            },
            "load_changed": list(compared.load),
        },
    }
