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
