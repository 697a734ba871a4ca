"""All entrants by name."""

from collections.abc import Mapping
from types import MappingProxyType

from tests.bench.league import dynamo, predictor
from tests.bench.league.entrant import Entrant
from tests.bench.league.own import EVENSTEP
from tests.bench.league.proxies import PROXIES
from tests.bench.league.rust_routers import SGLANG_ROUTER, SMG, VLLM_ROUTER

ENTRANTS: Mapping[str, Entrant] = MappingProxyType(
    {
        each.name: each
        for each in (
            *(*EVENSTEP, *VLLM_ROUTER, *SGLANG_ROUTER, *SMG, *PROXIES),
            *(*dynamo.ENTRANTS, *predictor.ENTRANTS),
        )
    }
)

_FURTHER = {
    "evenstep": (
        *("round_robin", "least_tokens", "least_prefill", "lmetric", "barrier_time"),
        *("kv_cost", "prefix_score", "prefix_score tuned"),
    ),
    "vllm-router": ("round_robin", "consistent_hash"),
    "sglang-router": ("round_robin", "power_of_two"),
    "smg": ("round_robin", "power_of_two", "prefix_hash", "consistent_hashing"),
    "envoy": ("maglev",),
    "haproxy": ("leastconn maxconn",),
    "dynamo": ("kv", "two-tier"),
    "predictor": ("XGBoost latency alone", "ridge"),
}
ONCE = frozenset(f"{product} {rule}" for product, rules in _FURTHER.items() for rule in rules)
"""Further rules of their products: they run with one seed, in ``ONCE_IN``."""

ONCE_IN = ("chat", "open-80", "decode-saturated")
