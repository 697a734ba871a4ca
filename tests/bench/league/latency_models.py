"""What a latency predictor learns from: samples in buckets, and models of them.

As the training server of llm-d-latency-predictor does it (commit 04e44cd8): features, buckets of
waiting requests, KV usage and prefix match, its defaults for XGBoost, and a pair of models, for
engines with and without waiting requests, as soon as each has enough samples.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Predict = Callable[[Floats], Floats]
Fit = Callable[[Floats, Floats], Predict]

MOST_IN_BUCKET = 500
FEWEST_TO_TRAIN = 100
FEWEST_TO_SPLIT = 200
UNTRAINED_MS = 10.0
_QUEUES = (0, 2, 5, 10)
_KV_BUCKETS, _PREFIX_BUCKETS = 20, 4
_ROUNDS = 200
_XGBOOST: Mapping[str, Any] = {
    "max_depth": 6,
    "learning_rate": 0.05,
    "subsample": 0.8,
    "colsample_bytree": 0.8,
    "min_child_weight": 5,
    "gamma": 0.2,
    "reg_alpha": 0.01,
    "reg_lambda": 0.1,
    "tree_method": "hist",
    "objective": "reg:squarederror",
    "seed": 42,
    "nthread": 1,
    "verbosity": 0,
}


@dataclass(frozen=True, slots=True)
class Features:
    """Of a request before an engine, when it is sent.

    Attributes:
        kv_share: KV memory in use, as scraped.
        waiting: requests that wait, as scraped.
        running: requests that were sent there and have not ended.
        prefill_tokens: uncached prompt tokens sent there without a first token so far.
        input_tokens: of the prompt.
        prefix: share of the prompt's blocks that were sent there before.
    """

    kv_share: float
    waiting: float
    running: int
    prefill_tokens: float
    input_tokens: int
    prefix: float

    def ttft_row(self) -> list[float]:
        return [
            *self.tpot_row(),
            self.prefix,
            (1 - self.prefix) * self.input_tokens,
            float(min(int(self.prefix * _PREFIX_BUCKETS), _PREFIX_BUCKETS - 1)),
        ]

    def tpot_row(self) -> list[float]:
        return [
            float(self.waiting > 0),
            self.kv_share,
            float(self.input_tokens),
            self.waiting,
            float(self.running),
            self.prefill_tokens,
        ]

    @property
    def bucket(self) -> tuple[int, int, int]:
        return (
            sum(self.waiting > most for most in _QUEUES),
            min(int(self.kv_share * _KV_BUCKETS), _KV_BUCKETS - 1),
            min(int(self.prefix * _PREFIX_BUCKETS), _PREFIX_BUCKETS - 1),
        )


class Samples:
    """Rows with their latencies; a full bucket forgets its oldest."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int, int], deque[tuple[list[float], float]]] = defaultdict(
            lambda: deque(maxlen=MOST_IN_BUCKET)
        )

    def add(self, features: Features, row: list[float], latency_ms: float) -> None:
        self._buckets[features.bucket].append((row, latency_ms))

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def taken(self, queued: bool | None = None) -> tuple[Floats, Floats]:
        """Rows and latencies: all, or of engines with or without waiting requests."""
        rows = [
            sample
            for (queue, _, _), samples in self._buckets.items()
            if queued is None or queued == (queue > 0)
            for sample in samples
        ]
        x = np.array([row for row, _ in rows], dtype=float)
        return x, np.array([latency for _, latency in rows], dtype=float)


class Model:
    """Predicts one latency in milliseconds; untrained it says the same for all."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._all: Predict | None = None
        self._split: tuple[Predict, Predict] | None = None

    def train(self, samples: Mapping[bool | None, tuple[Floats, Floats]]) -> None:
        """With all samples at None, those of engines without and with waiting at False, True."""
        self._all = self._fit(*samples[None])
        if min(len(samples[queued][1]) for queued in (False, True)) >= FEWEST_TO_SPLIT:
            self._split = self._fit(*samples[False]), self._fit(*samples[True])
        else:
            self._split = None

    def predict(self, rows: Sequence[list[float]]) -> list[float]:
        if self._all is None:
            return [UNTRAINED_MS] * len(rows)
        x = np.array(rows, dtype=float)
        if self._split is None:
            latencies = self._all(x)
        else:
            queued, latencies = x[:, 0] > 0, np.empty(len(x))
            for predict, chosen in zip(self._split, (~queued, queued), strict=True):
                if chosen.any():
                    latencies[chosen] = predict(x[chosen])
        return [max(0.0, float(latency)) for latency in latencies]


def ridge(x: Floats, y: Floats) -> Predict:
    """Bayesian ridge regression: both precisions are those of the greatest evidence."""
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale[scale == 0] = 1.0
    left, sizes, right = np.linalg.svd((x - mean) / scale, full_matrices=False)
    centred = y - y.mean()
    along = left.T @ centred
    noise, prior = 1.0 / max(float(centred.var()), 1e-12), 1.0
    for _ in range(100):
        kept = sizes**2 * noise / (sizes**2 * noise + prior)
        inverse = np.divide(kept, sizes, out=np.zeros_like(sizes), where=sizes > 1e-9)
        weights = right.T @ (inverse * along)
        error = float(((centred - (x - mean) / scale @ weights) ** 2).sum())
        prior = max(kept.sum(), 1e-12) / max(float(weights @ weights), 1e-12)
        noise = max(len(y) - kept.sum(), 1e-3) / max(error, 1e-12)
    base, slope = float(y.mean()), weights / scale
    return lambda rows: base + (rows - mean) @ slope


def boosted(packages: str) -> Fit:
    """XGBoost, from this folder of packages."""
    if packages not in sys.path:
        sys.path.append(packages)
    xgboost: Any = importlib.import_module("xgboost")

    def fit(x: Floats, y: Floats) -> Predict:
        booster = xgboost.train(
            dict(_XGBOOST), xgboost.DMatrix(x, label=y), num_boost_round=_ROUNDS
        )
        return forest(json.loads(booster.save_raw("json")))

    return fit


def forest(saved: Any) -> Predict:
    """XGBoost's trees, all at once: its own call takes a millisecond for a few rows."""
    learner = saved["learner"]
    base = float(learner["learner_model_param"]["base_score"].strip("[]"))
    trees = learner["gradient_booster"]["model"]["trees"]
    sizes = [len(tree["left_children"]) for tree in trees]
    roots = np.cumsum([0, *sizes[:-1]])
    start = np.repeat(roots, sizes)

    def flat(name: str, kind: type) -> Any:
        return np.concatenate([np.array(tree[name], dtype=kind) for tree in trees])

    # A leaf leads to itself; its value stands where other nodes have their threshold.
    left, right = (flat(name, np.int64) for name in ("left_children", "right_children"))
    leaf, itself = left < 0, np.arange(len(left))
    left, right = np.where(leaf, itself, left + start), np.where(leaf, itself, right + start)
    feature, threshold = flat("split_indices", np.int64), flat("split_conditions", np.float32)
    feature[leaf] = 0

    def predict(rows: Floats) -> Floats:
        x, at = rows.astype(np.float32), np.arange(len(rows))[:, None]
        node = np.tile(roots, (len(rows), 1))
        for _ in range(int(_XGBOOST["max_depth"])):
            node = np.where(x[at, feature[node]] < threshold[node], left[node], right[node])
        latencies: Floats = base + threshold[node].sum(axis=1, dtype=float)
        return latencies

    return predict
