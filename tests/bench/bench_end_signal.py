"""What the end signal of a trained model knows of coming ends, and what look-ahead gains by it.

    python tests/bench/bench_end_signal.py --record      # a real vLLM answers the prompts (an hour)
    python tests/bench/bench_end_signal.py [--seeds 5]   # skill and gain, from what was recorded

Real prompts (tests/data/prompts) are answered by SmolLM2-135M-Instruct in the CPU engine
(`make engine`), with the plug-in; a recording that was interrupted goes on. Skill: Brier skill of
the chance that an answer ends within some steps, against the base rate; what learns is fitted on
other prompts. Gain: simulated decoding of answers of these lengths, in which engines report what
the real one did.
"""

import argparse
import contextlib
import os
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.report.origin import Engines, origin
from router.core.forecast.end_signals import Departure, ReportedSignal, SurvivalSignal
from router.core.forecast.forecast import NO_CAP, Running
from tests.support.engine import ENVIRONMENT, installation
from tests.support.figure_files import write_figures, write_part
from tests.support.recorded_ends import MOST_TOKENS, SLOTS, TEMPERATURE, Answers
from tests.support.told_ends import gains

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "tests/data/prompts/prompts.jsonl.gz"
RECORDED = ROOT / "tests/data/end_signal/recorded.npz"
RESULT = ROOT / "tests/data/end_signal/skill.json"
NOTES = ROOT / "tests/data/end_signal/recorded.json"
MODEL = "SmolLM2-135M-Instruct"
RECORDING = ("engine_patches/end_signal.py", "tests/support/recorded_ends.py")
GIVEN = (
    "router/core/forecast",
    "tests/bench/bench_end_signal.py",
    "tests/data/end_signal/recorded.npz",
)
SIMULATED = (*GIVEN, "loadgen/simulator/decode", "tests/support/told_ends.py")
LINES = Path(tempfile.gettempdir()) / "evenstep-recorded-ends.jsonl"
HORIZONS = (1, 4, 16, 64)
EVERY = 4  # tokens between two judged states of an answer
FOLDS = 5
RIDGE = 50.0
RESAMPLED = 400
WORDS = ("list", "write", "essay", "story", "code", "explain", "short", "sentence", "step", "email")

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class States:
    """States of answers that are judged: each is a token of an answer; shape (n,)."""

    answer: NDArray[np.int64]
    age: NDArray[np.int64]
    told: Floats
    raw: Floats

    @classmethod
    def of(cls, answers: Answers) -> "States":
        ages = [np.arange(1 + i % EVERY, n, EVERY) for i, n in enumerate(answers.tokens)]
        answer = np.repeat(np.arange(len(ages)), [len(age) for age in ages])
        age = np.concatenate(ages)
        at = answers.starts[answer] + age - 1
        return cls(answer, age, answers.told[at], answers.raw[at])

    def running(self, answers: Answers) -> Running:
        n = len(self.age)
        return Running(
            id=np.arange(n),
            worker=np.zeros(n, dtype=np.int64),
            prompt_tokens=answers.prompt_tokens[self.answer],
            generated_tokens=self.age,
            max_tokens=np.full(n, NO_CAP),
            end_probability=self.told,
            prefill_left=np.zeros(n, dtype=np.int64),
            from_tokens=np.zeros(n, dtype=np.int64),
        )


def learned(answers: Answers, kept: NDArray[np.bool_]) -> SurvivalSignal:
    """The router's survival curve, of some answers."""
    signal = SurvivalSignal(memory_steps=1e9)
    for i in np.flatnonzero(kept).tolist():
        cap = NO_CAP if answers.stopped[i] else int(answers.tokens[i])
        prompt, tokens = int(answers.prompt_tokens[i]), int(answers.tokens[i])
        signal.ended(Departure(i, prompt, tokens, True, cap))
    signal.advance(256)
    signal.observe(States.of(answers).running(answers).take(slice(0)))
    return signal


def logistic(features: Floats, outcomes: Floats) -> Floats:
    """Weights by Newton's method, the first one's feature being 1; a ridge holds back the others.

    The states of one answer are alike, so that a rare word could else explain a few answers.
    """
    weights, ridge = np.zeros(features.shape[1]), np.full(features.shape[1], RIDGE)
    ridge[0] = 1e-6
    weights[0] = log_odds(outcomes.mean(keepdims=True))[0]
    for _ in range(30):
        chances = 1 / (1 + np.exp(-np.clip(features @ weights, -30, 30)))
        slope = features.T @ (outcomes - chances) - ridge * weights
        curve = (features * (chances * (1 - chances))[:, None]).T @ features
        step = np.linalg.solve(curve + np.diag(ridge), slope)
        weights += step
        if np.abs(step).max() < 1e-6:
            break
    return weights


def fitted(features: Floats, outcomes: Floats, fold: NDArray[np.int64]) -> Floats:
    """Chances of each state by a model of the other folds' states."""
    features = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-9)
    features = np.column_stack([np.ones(len(features)), features])
    chances = np.empty(len(outcomes))
    for number in range(FOLDS):
        weights = logistic(features[fold != number], outcomes[fold != number])
        chances[fold == number] = 1 / (
            1 + np.exp(-np.clip(features[fold == number] @ weights, -30, 30))
        )
    return chances


def prompt_features(answers: Answers, states: States) -> Floats:
    """What a router may see of a prompt, beside the age of its answer."""
    texts = [text.lower() for text in answers.prompts]
    columns = [
        np.log2(answers.prompt_tokens),
        [text.count("\n") > 0 for text in texts],
        [text.count("?") > 0 for text in texts],
        *([word in text for text in texts] for word in WORDS),
    ]
    own = np.array(columns, dtype=float).T[states.answer]
    age = np.log2(1 + states.age)[:, None]
    return np.column_stack([own, age, own * age])


def log_odds(chances: Floats) -> Floats:
    bounded = np.clip(chances, 1e-6, 1 - 1e-6)
    return np.log(bounded / (1 - bounded))


def skills(answers: Answers, seed: int = 0) -> dict[str, dict[str, Any]]:
    """By horizon and signal: skill with its 95 % interval over prompts."""
    states, rng = States.of(answers), np.random.default_rng(seed)
    folds = rng.integers(FOLDS, size=len(answers.tokens))
    fold, running = folds[states.answer], states.running(answers)
    result: dict[str, dict[str, Any]] = {}
    curves = [learned(answers, folds != number) for number in range(FOLDS)]
    for horizon in HORIZONS:
        ahead = np.array([[horizon]])
        left = answers.tokens[states.answer] - states.age
        known = answers.stopped[states.answer] | (left > horizon)
        ends = (left <= horizon).astype(float)
        survival = np.empty(len(ends))
        for number, curve in enumerate(curves):
            some = fold == number
            survival[some] = 1 - curve.chances(running.take(some), ahead)[0]
        told = 1 - ReportedSignal().chances(running, ahead)[0]
        raw = 1 - ReportedSignal().chances(replace(running, end_probability=states.raw), ahead)[0]
        signals = np.column_stack([np.log(states.told + 1e-9), np.log(states.raw + 1e-9)])
        odds = log_odds(survival)[:, None]
        prompts = np.column_stack([odds, prompt_features(answers, states)])
        chances = {
            "learned lengths": survival,
            "prompt alone": fitted(prompts[known], ends[known], fold[known]),
            "end signal": told,
            "end signal, not averaged": raw,
            "learned lengths and end signal": fitted(
                np.column_stack([odds, signals])[known], ends[known], fold[known]
            ),
        }
        whole = {
            name: each if len(each) == known.sum() else each[known]
            for name, each in chances.items()
        }
        result[str(horizon)] = {
            "states": int(known.sum()),
            "ends": int(ends[known].sum()),
            "skill": judged(whole, ends[known], states.answer[known], rng),
        }
    return result


def judged(
    chances: dict[str, Floats], ends: Floats, answer: NDArray[np.int64], rng: np.random.Generator
) -> dict[str, list[float]]:
    """Skill of each, and the bounds of its interval over answers drawn anew."""
    count = int(answer.max()) + 1
    draws = np.stack(
        [np.bincount(rng.integers(count, size=count), minlength=count) for _ in range(RESAMPLED)]
    )
    base = np.bincount(answer, (ends - ends.mean()) ** 2, count)
    found = {}
    for name, each in chances.items():
        errors = np.bincount(answer, (each - ends) ** 2, count)
        spread = 1 - (draws @ errors) / (draws @ base)
        low, high = np.quantile(spread, [0.025, 0.975])
        found[name] = [round(float(x), 4) for x in (1 - errors.sum() / base.sum(), low, high)]
    return found


def keep(lines: Path, vllm: str) -> None:
    """Keep what has been recorded so far, and how."""
    RECORDED.parent.mkdir(exist_ok=True)
    answers = Answers.read(lines, PROMPTS)
    answers.write(RECORDED, PROMPTS)
    how = {
        "model": MODEL,
        "temperature": TEMPERATURE,
        "most_tokens": MOST_TOKENS,
        "slots": SLOTS,
        "answers": len(answers.tokens),
        "ended_by_themselves": int(answers.stopped.sum()),
        "mean_tokens": round(float(answers.tokens.mean()), 1),
    }
    write_figures(NOTES, how, origin(Engines.REAL, RECORDING, vllm=vllm), RECORDED)


def record(lines: Path) -> None:
    """Let the engine answer what is not in ``lines``, and keep what it said."""
    engine = installation()
    if engine is None:
        raise SystemExit("no engine: run `make engine` first")
    command = [engine.python, "-m", "tests.support.recorded_ends", engine.trained, PROMPTS, lines]
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    # Interrupted: what has been answered is kept, and the next call goes on.
    with contextlib.suppress(KeyboardInterrupt):
        subprocess.run(list(map(str, command)), env=environment, check=True)
    keep(lines, engine.vllm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="answer the prompts")
    parser.add_argument("--keep", action="store_true", help="keep what is answered so far")
    parser.add_argument("--lines", type=Path, default=LINES, help="where answers are written")
    parser.add_argument("--seeds", type=int, default=5, help="of the simulations")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.lines)
    engine = installation()
    if arguments.keep and engine is not None:
        keep(arguments.lines, engine.vllm)
    answers = Answers.load(RECORDED, PROMPTS)
    of_skill = origin(Engines.REAL, GIVEN)
    write_part(RESULT, "skill", {"horizons": skills(answers)}, of_skill)
    of_gain = origin(Engines.SIMULATED, SIMULATED)
    write_part(RESULT, "gain", gains(answers, arguments.seeds), of_gain)


if __name__ == "__main__":
    main()
