"""Which group serves which model, and which of its workers, as engines say at ``/v1/models``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from router.errors import InvalidRequestError, NoWorkerError, UnknownModelError
from router.proxy.parse import DEFAULT_LIMITS, RequestLimits

if TYPE_CHECKING:
    from router.cluster import Cluster
    from router.types import WorkerSpec

# What an engine says of a model.
Card = Mapping[str, Any]

# Characters of a name that the answer to its sender repeats.
_SHOWN = 200

_NO_ALIASES: Mapping[str, str] = MappingProxyType({})


class ModelTable:
    """Models by group; a model stays known while the workers that serve it are down.

    It is forgotten when none of its group's workers serves it any more, and with its group.

    Args:
        cluster: for the groups and their workers.
        aliases: further names of models; one that is a model's own as well goes before it.
        limits: of each request; also an attribute.

    Attributes:
        absent: workers of its group that do not serve a model, where there are any.
    """

    def __init__(
        self,
        cluster: Cluster,
        aliases: Mapping[str, str] = _NO_ALIASES,
        limits: RequestLimits = DEFAULT_LIMITS,
    ) -> None:
        self.limits = limits
        self.absent: Mapping[str, frozenset[str]] = {}
        self._cluster = cluster
        self._aliases = aliases
        self._said: dict[str, tuple[str, Mapping[str, Card]]] = {}
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

    def tokens(self, group: str, text_bytes: int, parts: int = 0) -> int:
        """What a text, with images and the like, comes to in a group, by estimate."""
        return self._cluster.groups[group].token_rate.tokens(text_bytes, parts)

    def most_slots(self, group: str) -> int | None:
        """Slots of the largest worker of a group; None: none reports them."""
        return self._cluster.groups[group].most_slots

    def prefills(self, group: str, lacks: Set[str]) -> str | None:
        """The group that computes a group's prompts, unless none of its workers can."""
        prefills = self._cluster.prefill_group(group)
        return None if prefills is None or prefills.workers.keys() <= lacks else prefills.name

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
        """A worker said what it serves; a group keeps a model while one of its workers serves it.

        Else it is the first group's that serves it.
        """
        group = self._cluster.group_of(worker_id)
        self._said[worker_id] = (group.serves or group).name, cards
        self._settle()

    def join(self, spec: WorkerSpec) -> None:
        """One more worker, which has said nothing yet."""

    def leave(self, worker_id: str) -> None:
        """A worker goes; what it serves stays known if nobody is left in its group."""
        if worker_id in self._said:
            group, _ = self._said[worker_id]
            if sum(of == group for of, _ in self._said.values()) > 1:
                del self._said[worker_id]
                self._settle()

    def _settle(self) -> None:
        """Find anew which workers serve which model."""
        known, serving = self._cluster.knows, dict[str, dict[str, Card]]()
        there = {group for worker_id, (group, _) in self._said.items() if known(worker_id)}
        self._said = {i: said for i, said in self._said.items() if known(i) or said[0] not in there}
        for group, cards in self._said.values():
            for model, card in cards.items():
                serving.setdefault(model, {}).setdefault(group, card)
        kept = {model: at for model, at in self._group_of.items() if at in serving.get(model, ())}
        self._group_of = kept | {m: next(iter(by)) for m, by in serving.items() if m not in kept}
        self._cards = {model: serving[model][group] for model, group in self._group_of.items()}
        lacking = {
            model: frozenset(
                worker_id
                for worker_id, (at, cards) in self._said.items()
                if at == group and model not in cards
            )
            for model, group in self._group_of.items()
        }
        self.absent = {model: workers for model, workers in lacking.items() if workers}

    def lacking(self, model: str | None) -> frozenset[str]:
        """Workers of its group that do not serve a model.

        Raises:
            NoWorkerError: those that do are all down.
        """
        lacks = self.absent.get(model or "", frozenset())
        if lacks:
            check_served(model, lacks, self._cluster.groups[self.group(model)].askable)
        return lacks

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
        if any(group not in groups for group in self._group_of.values()):
            self._said = {i: said for i, said in self._said.items() if said[0] in groups}
            self._settle()


def check_served(model: str | None, lacks: Set[str], askable: Set[str]) -> None:
    """See that not all workers that can be asked lack a model.

    Raises:
        NoWorkerError: they do.
    """
    if askable and askable <= lacks:
        raise NoWorkerError(f"no worker that serves {model!r} is up; retry")


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
    shown = model if len(model) <= _SHOWN else f"{model[:_SHOWN]}…"
    said = f"The model `{shown}` does not exist. Valid aliases: {names}."  # in vLLM's words
    raise UnknownModelError(said, param="model")
