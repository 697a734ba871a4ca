"""What proxies go by: the deciding process tells them, and tells them again when it changes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from router.access.keys import Key
from router.deadlines import Deadlines
from router.http.limits import HttpLimits
from router.models import group_of


class GroupCard(msgspec.Struct, frozen=True):
    """A group that answers.

    Attributes:
        bytes_per_token: of its prompts' text, as learned so far.
        prefills: the group that computes its prompts, if there is one.
        askable: ids of its workers that take requests, if not right now.
    """

    bytes_per_token: float
    prefills: str | None
    askable: frozenset[str]


class Patience(msgspec.Struct, frozen=True):
    """How often and for how long requests are tried; see ``RelayContext`` and ``RetryBudget``."""

    max_attempts: int
    deadlines: Deadlines
    retry_share: float
    retry_min_per_s: float


class Access(msgspec.Struct, frozen=True):
    """Who may ask.

    Attributes:
        keys: those of clients; None: anybody may.
        hidden: what clients show is not passed on to engines.
    """

    keys: tuple[Key, ...] | None
    hidden: bool


class Serving(msgspec.Struct, frozen=True):
    """How a proxy serves its clients.

    Attributes:
        limits: of its port; as they are when it starts.
        tls: files of the certificate and its key, None for plain HTTP; likewise.
        tls_reads: grows by one when the files are to be read again.
        drain_delay_s: see ``Lifecycle``; ``grace_s`` too.
        log_level: see ``start_logging``; ``log_format`` too.
        worker_key: what engines are shown; as it is when it starts.
        connect_timeout_s: of connections to engines; likewise.
    """

    limits: HttpLimits
    tls: tuple[str, str | None] | None
    tls_reads: int
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
    """

    groups: Mapping[str, GroupCard]
    models: Mapping[str, str]
    aliases: Mapping[str, str]
    known: tuple[str, ...]
    ranked: frozenset[str]
    patience: Patience
    access: Access
    serving: Serving

    def resolve(self, name: str | None) -> str | None:
        """See ``ModelTable.resolve``."""
        return name if name is None else self.aliases.get(name, name)

    def group(self, model: str | None) -> str:
        """See ``ModelTable.group``."""
        if model is None and len(self.groups) == 1:
            return next(iter(self.groups))
        return group_of(model, self.models, lambda: self.known)

    def tokens(self, group: str, text_bytes: int) -> int:
        """See ``ModelTable.tokens``."""
        return math.ceil(text_bytes / self.groups[group].bytes_per_token)

    def prefills(self, group: str) -> str | None:
        """See ``ModelTable.prefills``."""
        return self.groups[group].prefills
