"""Which group serves which model, as the engines say at ``/v1/models``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from router.errors import InvalidRequestError, NoWorkerError, UnknownModelError

if TYPE_CHECKING:
    from router.cluster import Cluster

# What an engine says of a model.
Card = Mapping[str, Any]

_NO_ALIASES: Mapping[str, str] = MappingProxyType({})


class ModelTable:
    """Models by group; a model stays known while the workers that serve it are down.

    It is forgotten with its group.

    Args:
        cluster: for the groups and who belongs to them.
        aliases: further names of models; one that is a model's own as well goes before it.
    """

    def __init__(self, cluster: Cluster, aliases: Mapping[str, str] = _NO_ALIASES) -> None:
        self._cluster = cluster
        self._aliases = aliases
        self._group_of: dict[str, str] = {}
        self._cards: dict[str, Card] = {}

    @property
    def names(self) -> Sequence[str]:
        """All models that have been seen, in the order of their first being seen."""
        self._forget()
        return list(self._group_of)

    @property
    def cards(self) -> Sequence[Card]:
        """What is said of each model, and of each alias of one that has been seen."""
        models = [{**self._cards[name], "id": name} for name in self.names]
        aliases = [
            {**self._cards[model], "id": alias, "root": model}
            for alias, model in self._aliases.items()
            if model in self._cards
        ]
        return [card for card in models if card["id"] not in self._aliases] + aliases

    def tokens(self, group: str, text_bytes: int) -> int:
        """What a text comes to in a group, by estimate."""
        return self._cluster.groups[group].token_rate.tokens(text_bytes)

    def prefills(self, group: str) -> str | None:
        """The group that computes a group's prompts, if there is one."""
        prefills = self._cluster.prefill_group(group)
        return None if prefills is None else prefills.name

    @property
    def known(self) -> list[str]:
        """What clients may call the models."""
        return [str(card["id"]) for card in self.cards]

    @property
    def by_group(self) -> Mapping[str, str]:
        """The group of each model that has been seen."""
        self._forget()
        return self._group_of

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of models."""
        return self._aliases

    def learn(self, worker_id: str, cards: Mapping[str, Card]) -> None:
        """A worker said what it serves; the first group to serve a model keeps it."""
        self._forget()
        group = self._cluster.group_of(worker_id)
        for model, card in cards.items():
            if model not in self._group_of:
                self._group_of[model] = (group.serves or group).name
                self._cards[model] = card

    def resolve(self, name: str | None) -> str | None:
        """The model that is meant by a name, which is its own where it is no alias."""
        return name if name is None else self._aliases.get(name, name)

    def group(self, model: str | None) -> str:
        """The group for a request.

        Raises:
            InvalidRequestError: no model is named, and there are several groups.
            NoWorkerError: no worker has answered yet, so that nothing is known.
            UnknownModelError: no group serves it.
        """
        if model is None:
            groups = [group.name for group in self._cluster.groups.values() if group.serves is None]
            if len(groups) == 1:
                return groups[0]
        self._forget()
        return group_of(model, self._group_of, lambda: self.known)

    def _forget(self) -> None:
        """Groups may have gone since the last look."""
        groups = self._cluster.groups
        for model in [model for model, group in self._group_of.items() if group not in groups]:
            del self._group_of[model], self._cards[model]


def group_of(
    model: str | None, groups: Mapping[str, str], known: Callable[[], Iterable[str]]
) -> str:
    """The group that serves a model, of those that models have.

    Raises:
        InvalidRequestError: no model is named.
        NoWorkerError: no group serves any.
        UnknownModelError: no group serves it; ``known`` are told instead.
    """
    if not groups:
        raise NoWorkerError("no worker has answered yet; retry in a moment")
    if model is not None and model in groups:
        return groups[model]
    names = ", ".join(known())
    if model is None:
        raise InvalidRequestError(f"name a 'model', one of: {names}", param="model")
    said = f"The model `{model}` does not exist. Valid aliases: {names}."  # in vLLM's words
    raise UnknownModelError(said, param="model")
