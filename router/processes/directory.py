"""The routing data of proxies; the deciding process sends it again whenever it changes."""

from collections.abc import Mapping

import msgspec

from router.access.key_ring import Key
from router.core.request_limits import DEFAULT_LIMITS, RequestLimits
from router.core.state.rates import tokens_of
from router.dispatch.models import CachedModel, Route, cached, check_served, group_of, other_ranks
from router.http.port import EndingSettings, HttpLimits
from router.proxy.context import RelaySettings


class GroupCard(msgspec.Struct, frozen=True):
    """A group that answers requests, and what those that share its models have."""

    bytes_per_token: float  # of prompt text
    prefills: str | None  # group that computes its prompts
    askable: frozenset[str]  # ids of workers that take requests, now or soon
    tokens_per_part: float = 0.0  # for an image or other non-text part
    most_slots: int | None = None
    ranks: Mapping[str, int] = {}  # data-parallel rank of each worker
    asks: bool = False  # whether it asks for the content of its requests


class Patience(msgspec.Struct, frozen=True):
    """Settings of relays, and a proxy's part of the ``RetryBudget``."""

    relay: RelaySettings
    retry_budget: float
    retry_min_per_s: float


class Access(msgspec.Struct, frozen=True):
    """``keys``: None if none is needed; ``hidden``: engines do not get them."""

    keys: tuple[Key, ...] | None
    hidden: bool


# Certificate and key as PEM; None: the key is in the same file.
Pair = tuple[bytes, bytes | None]


class Serving(msgspec.Struct, frozen=True):
    """``limits``, ``worker_key``, ``connect_timeout_s`` (to engines) are fixed at its start."""

    limits: HttpLimits
    tls: Pair | None
    ending: EndingSettings
    log_level: str
    log_format: str
    worker_key: str | None
    connect_timeout_s: float


class Directory(msgspec.Struct, frozen=True):
    """All that a proxy needs to relay a request itself; implements ``ModelTable``'s queries.

    Attributes:
        absent, adapters, tokenizers: as in ``ModelTable``.
        divided: models whose requests the deciding process sends to one of several lines.
    """

    groups: Mapping[str, GroupCard]
    models: Mapping[str, str]
    aliases: Mapping[str, str]
    known: tuple[str, ...]  # model names that clients may use
    ranked: frozenset[str]  # URLs shared by several ranks, which a header distinguishes
    patience: Patience
    access: Access
    serving: Serving
    limits: RequestLimits = DEFAULT_LIMITS
    absent: Mapping[str, frozenset[str]] = {}
    adapters: frozenset[str] = frozenset()
    tokenizers: Mapping[str, str] = {}
    divided: frozenset[str] = frozenset()

    def route(self, name: str | None) -> Route:
        model = name if name is None else self.aliases.get(name, name)
        group = self.models.get(model) if model is not None else None
        if group is None:
            group = self.group(model)
        card, lacks = self.groups[group], self.absent.get(model or "", frozenset())
        if model in self.divided:
            return Route(model, group, lacks, None, card.prefills, divided=True)
        if lacks:
            check_served(model, lacks, card.askable)
        return Route(model, group, lacks, card.most_slots, card.prefills)

    def cached_as(self, name: str | None) -> CachedModel | None:
        model = name if name is None else self.aliases.get(name, name)
        group = self.models.get(model) if model is not None else self._only()
        if group is None or not self.groups[group].asks:
            return None
        return cached(model, self.adapters, self.tokenizers)

    def all_but(self, group: str, rank: int, lacks: frozenset[str]) -> frozenset[str]:
        card = self.groups[group]
        return other_ranks(card.ranks, rank, lacks, card.askable)

    def group(self, model: str | None) -> str:
        if model is None and (only := self._only()) is not None:
            return only
        return group_of(model, self.models, lambda: self.known)

    def _only(self) -> str | None:
        return next(iter(self.groups)) if len(self.groups) == 1 else None

    def tokens(self, group: str, text_bytes: int, parts: int = 0) -> int:
        card = self.groups[group]
        return tokens_of(text_bytes, parts, card.bytes_per_token, card.tokens_per_part)
