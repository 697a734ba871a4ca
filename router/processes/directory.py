"""What proxies go by: the deciding process tells them, and tells them again when it changes."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from router.access.keys import Key
from router.deadlines import Deadlines
from router.http.limits import HttpLimits
from router.models import check_served, group_of
from router.proxy.parse import DEFAULT_LIMITS, RequestLimits
from router.token_rate import tokens_of


class GroupCard(msgspec.Struct, frozen=True):
    """A group that answers.

    Attributes:
        bytes_per_token: of its prompts' text, as learned so far.
        prefills: the group that computes its prompts, if there is one.
        askable: ids of its workers that take requests, if not right now.
        tokens_per_part: of its prompts' images and the like, as learned so far.
        most_slots: of its largest worker, as far as engines report them.
    """

    bytes_per_token: float
    prefills: str | None
    askable: frozenset[str]
    tokens_per_part: float = 0.0
    most_slots: int | None = None


class Patience(msgspec.Struct, frozen=True):
    """How often and for how long requests are tried; see ``RelayContext`` and ``RetryBudget``."""

    max_attempts: int
    deadlines: Deadlines
    retry_share: float
    retry_min_per_s: float
    tells: bool = False


class Access(msgspec.Struct, frozen=True):
    """Who may ask.

    Attributes:
        keys: those of clients; None: anybody may.
        hidden: what clients show is not passed on to engines.
    """

    keys: tuple[Key, ...] | None
    hidden: bool


# A certificate and its key as PEM, for which None stands where they are in one file.
Pair = tuple[bytes, bytes | None]


class Serving(msgspec.Struct, frozen=True):
    """How a proxy serves its clients.

    Attributes:
        limits: of its port; as they are when it starts.
        tls: what its clients are shown, None for plain HTTP.
        drain_delay_s: see ``Lifecycle``; ``grace_s`` too.
        log_level: see ``start_logging``; ``log_format`` too.
        worker_key: what engines are shown; as it is when it starts.
        connect_timeout_s: of connections to engines; likewise.
    """

    limits: HttpLimits
    tls: Pair | None
    drain_delay_s: float
    grace_s: float
    log_level: str
    log_format: str
    worker_key: str | None
    connect_timeout_s: float


class Directory(msgspec.Struct, frozen=True):
    """All that a proxy has to know to serve a request that it need not pass on whole.

    Attributes:
        groups: those that answer, by name.
        models: the group of each model.
        aliases: further names of models.
        known: what clients may call the models.
        ranked: URLs behind which several ranks are told apart by a header.
        patience: see ``Patience``.
        access: see ``Access``.
        serving: see ``Serving``.
        absent: workers of its group that do not serve a model, where there are any.
        limits: of each request.
    """

    groups: Mapping[str, GroupCard]
    models: Mapping[str, str]
    aliases: Mapping[str, str]
    known: tuple[str, ...]
    ranked: frozenset[str]
    patience: Patience
    access: Access
    serving: Serving
    limits: RequestLimits = DEFAULT_LIMITS
    absent: Mapping[str, frozenset[str]] = {}

    def resolve(self, name: str | None) -> str | None:
        """See ``ModelTable.resolve``."""
        return name if name is None else self.aliases.get(name, name)

    def group(self, model: str | None) -> str:
        """See ``ModelTable.group``."""
        if model is None and len(self.groups) == 1:
            return next(iter(self.groups))
        return group_of(model, self.models, lambda: self.known)

    def tokens(self, group: str, text_bytes: int, parts: int = 0) -> int:
        """See ``ModelTable.tokens``."""
        card = self.groups[group]
        return tokens_of(text_bytes, parts, card.bytes_per_token, card.tokens_per_part)

    def most_slots(self, group: str) -> int | None:
        """See ``ModelTable.most_slots``."""
        return self.groups[group].most_slots

    def prefills(self, group: str, lacks: Set[str]) -> str | None:
        """See ``ModelTable.prefills``; the deciding process looks at what they lack."""
        return self.groups[group].prefills

    def lacking(self, model: str | None) -> frozenset[str]:
        """See ``ModelTable.lacking``."""
        lacks = self.absent.get(model or "", frozenset())
        if lacks:
            check_served(model, lacks, self.groups[self.group(model)].askable)
        return lacks
