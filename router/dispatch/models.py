"""Models by group and by worker, as engines report them at ``/v1/models``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from router.core.errors import InvalidRequestError, NoWorkerError, UnknownModelError
from router.core.request_limits import DEFAULT_LIMITS, RequestLimits
from router.core.types import Card

if TYPE_CHECKING:
    from router.core.state.cluster import Cluster
    from router.core.state.group import Group
    from router.core.types import WorkerSpec


# Characters of a name that an answer repeats.
_SHOWN = 200

# Groups by name, each in one line.
Lines = Sequence[Sequence[str]]


class Route(NamedTuple):
    """Where requests for a model go: to a group, and to all that share its models.

    ``lacks``: workers of these that do not serve the model. ``prefills``: group that computes its
    prompts.
    """

    model: str | None
    group: str
    lacks: frozenset[str]
    most_slots: int | None
    prefills: str | None


class CachedModel(NamedTuple):
    """A model as prefix caches know it."""

    name: str
    adapter: str  # its name if it is a LoRA adapter
    tokenizer: str = ""  # folder of its tokenizer; empty: the router has none


@dataclass(slots=True, eq=False)
class ModelTable:
    """Models by group, also of workers that are down.

    Attributes:
        aliases: further names; an alias precedes a model of the same name.
        tokenizers: folders by model; by an empty name for all others.
        on_shared: called with all groups, those that serve a model together side by side, and with
            the group of each model, when the former change.
        divided: models that several lines serve: the first group of each.
        absent: workers of a model's groups that lack it, by model.
        adapters: names of LoRA adapters.
    """

    cluster: Cluster
    aliases: Mapping[str, str] = field(default_factory=dict)
    limits: RequestLimits = DEFAULT_LIMITS
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    on_shared: Callable[[Lines, Mapping[str, str]], None] = lambda *_: None
    divided: Mapping[str, Sequence[str]] = field(default_factory=dict)
    absent: Mapping[str, frozenset[str]] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()
    _together: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _said: dict[str, tuple[str, Mapping[str, Card]]] = field(default_factory=dict)
    _last: dict[str, Mapping[str, Card]] = field(default_factory=dict)  # of groups without workers
    _group_of: dict[str, str] = field(default_factory=dict)
    _cards: dict[str, Card] = field(default_factory=dict)

    @property
    def names(self) -> Sequence[str]:
        self._forget()
        return list(self._group_of)

    @property
    def cards(self) -> Sequence[Card]:
        models = [{**self._cards[name], "id": name} for name in self.names]
        aliases = [
            {**self._cards[model], "id": alias, "root": model}
            for alias, model in self.aliases.items()
            if model in self._cards
        ]
        return [card for card in models if card["id"] not in self.aliases] + aliases

    def tokens(self, group: str, text_bytes: int, parts: int = 0) -> int:
        return self.cluster.groups[group].token_rate.tokens(text_bytes, parts)

    def prefills(self, group: str, lacks: Set[str]) -> str | None:
        """None if all workers of the prefill group lack the model."""
        prefills = self.cluster.prefill_group(group)
        return None if prefills is None or prefills.workers.keys() <= lacks else prefills.name

    def learn(self, worker_id: str, cards: Mapping[str, Card]) -> None:
        """A model keeps its group while a worker there serves it."""
        group = self.cluster.group_of(worker_id)
        name = (group.serves or group).name
        self._said[worker_id] = name, cards
        self._last.pop(name, None)
        self._settle()

    def join(self, spec: WorkerSpec) -> None:
        """Do nothing: it has reported no models yet."""

    def leave(self, worker_id: str) -> None:
        """Call it once the cluster is without it.

        A group's last report stays for models that no other serves.
        """
        group, cards = self._said.pop(worker_id, ("", {}))
        if cards and all(of != group for of, _ in self._said.values()):
            self._last[group] = cards
        self._settle()

    def _settle(self) -> None:
        serving = dict[str, dict[str, Card]]()
        for group, cards in self._said.values():
            for model, card in cards.items():
                serving.setdefault(model, {}).setdefault(group, card)
        here = [list(groups) for groups in serving.values()]
        served = set(serving)
        for group, cards in self._last.items():
            for model in cards.keys() - served:
                serving.setdefault(model, {})[group] = cards[model]
        kept = {model: at for model, at in self._group_of.items() if at in serving.get(model, ())}
        self._group_of = kept | {m: next(iter(by)) for m, by in serving.items() if m not in kept}
        self._cards = {model: serving[model][group] for model, group in self._group_of.items()}
        # Engines name the model that an adapter extends.
        self.adapters = frozenset(m for m, card in self._cards.items() if card.get("parent"))
        self._draw_lines(here)
        first = {name: line[0] for name, line in self._together.items()}
        lines = {m: tuple(dict.fromkeys(first.get(g, g) for g in by)) for m, by in serving.items()}
        self.divided = {model: each for model, each in lines.items() if len(each) > 1}
        lacking = {
            model: frozenset(
                worker_id
                for worker_id, (at, cards) in self._said.items()
                if first.get(at) in each and model not in cards
            )
            for model, each in lines.items()
        }
        self.absent = {model: workers for model, workers in lacking.items() if workers}

    def _draw_lines(self, serving: Iterable[Iterable[str]]) -> None:
        """Groups with a model in common, directly or by others between, have one line."""
        prefills, before = self.cluster.prefill_group, self._together
        lines: dict[str, tuple[str, ...]] = {
            each.name: (each.name,) for each in self.cluster.answering
        }
        for groups in serving:
            sharing = [lines[one] for one in groups if one in lines and prefills(one) is None]
            every = tuple(dict.fromkeys(each for line in sharing for each in line))
            lines |= dict.fromkeys(every, every)
        self._together = lines
        if any(set(line) != set(before.get(name, (name,))) for name, line in lines.items()):
            self.on_shared(list(dict.fromkeys(lines.values())), self._group_of)

    def together(self, group: str) -> tuple[str, ...]:
        """All groups that share its models, itself included."""
        return self._together.get(group, (group,))

    def askable(self, group: str) -> Set[str]:
        """Workers of these groups that take requests."""
        return set[str]().union(*(each.askable for each in self.groups(group)))

    def most_slots(self, group: str) -> int | None:
        """Slots of the largest engine; None unless all report theirs."""
        most = [each.most_slots for each in self.groups(group)]
        return None if None in most else max(filter(None, most), default=None)

    def groups(self, group: str) -> list[Group]:
        """Those that share its models, itself included."""
        known = self.cluster.groups
        return [known[name] for name in self.together(group) if name in known]

    def serving(self, model: str | None) -> list[Group]:
        """All groups of the lines that serve it; errors as from ``group``."""
        self._forget()  # they may all have gone
        lines = self.divided.get(model or "") or [self.group(model)]
        return [group for first in lines for group in self.groups(first)]

    def lacking(self, model: str | None) -> frozenset[str]:
        """Workers of these groups that do not serve it; errors as from ``check_served``."""
        lacks = self.absent.get(model or "", frozenset())
        if lacks:
            askable = set[str]().union(*(group.askable for group in self.serving(model)))
            check_served(model, lacks, askable)
        return lacks

    def _least_full(self, lines: Sequence[str], lacks: Set[str]) -> str:
        """The line with the fewest requests for its slots, and their rate once all are known."""
        able = [name for name in lines if self.askable(name) - lacks]
        loads = [load_of(self.groups(name)) for name in able]
        rated = all(per_s for _, _, per_s in loads)
        full = [(requests + 1) / (per_s if rated else slots) for requests, slots, per_s in loads]
        return able[full.index(min(full))] if able else lines[0]

    def route(self, name: str | None) -> Route:
        """Errors as from ``group`` and ``lacking``."""
        model = self.resolve(name)
        lacks = self.absent.get(model or "", frozenset())
        lines = self.divided.get(model or "")
        group = self._least_full(lines, lacks) if lines else self._group_of.get(model or "")
        if group not in self.cluster.groups:
            group = self.group(model)
        if lacks:
            check_served(model, lacks, self.askable(group))
        return Route(model, group, lacks, self.most_slots(group), self.prefills(group, lacks))

    def cached_as(self, name: str | None) -> CachedModel | None:
        """None: its group does not ask for the content of requests, or no group is known."""
        model = self.resolve(name)
        group = self._group_of.get(model) if model is not None else self._only()
        lines = self.divided.get(model or "") or ([] if group is None else [group])
        if not any(each.asks_for_content for line in lines for each in self.groups(line)):
            return None
        name = model or ""
        tokenizer = self.tokenizers.get(name) or self.tokenizers.get("", "")
        return CachedModel(name, name if name in self.adapters else "", tokenizer)

    def all_but(self, group: str, rank: int, lacks: frozenset[str]) -> frozenset[str]:
        """``lacks`` and the workers of other ranks; one without is numbered in its group's order.

        Raises:
            InvalidRequestError: there is no such rank.
            NoWorkerError: none of the rank takes requests.
        """
        ranks = {
            worker_id: index if worker.spec.rank is None else worker.spec.rank
            for each in self.groups(group)
            for index, (worker_id, worker) in enumerate(each.workers.items())
        }
        if rank not in ranks.values():
            known = ", ".join(map(str, sorted(set(ranks.values()))))
            raise InvalidRequestError(
                f"no worker has data-parallel rank {rank}; there are {known}",
                param="X-Data-Parallel-Rank",
            )
        others = lacks.union(worker_id for worker_id, own in ranks.items() if own != rank)
        askable = self.askable(group)
        if askable and askable <= others:
            raise NoWorkerError(f"no worker of data-parallel rank {rank} is up; retry")
        return others

    def resolve(self, name: str | None) -> str | None:
        return name if name is None else self.aliases.get(name, name)

    def group(self, model: str | None) -> str:
        """Without a model, the only group.

        Raises:
            NoWorkerError: no worker has told its models yet.
            InvalidRequestError: a model must be named.
            UnknownModelError: no group serves it.
        """
        if model is None and (only := self._only()) is not None:
            return only
        self._forget()
        if not self._group_of:
            raise NoWorkerError("no worker has answered yet; retry in a moment")
        if model in self._group_of:
            return self._group_of[model]
        names = ", ".join(str(card["id"]) for card in self.cards)
        if model is None:
            raise InvalidRequestError(f"name a 'model', one of: {names}", param="model")
        shown = model if len(model) <= _SHOWN else f"{model[:_SHOWN]}…"
        said = f"The model `{shown}` does not exist. Valid aliases: {names}."  # vLLM's words
        raise UnknownModelError(said, param="model")

    def _only(self) -> str | None:
        groups = self.cluster.answering
        return groups[0].name if len(groups) == 1 else None

    def _forget(self) -> None:
        groups = self.cluster.groups
        if any(group not in groups for group in self._group_of.values()):
            self._said = {i: said for i, said in self._said.items() if said[0] in groups}
            self._last = {name: cards for name, cards in self._last.items() if name in groups}
            self._settle()


def check_served(model: str | None, lacks: Set[str], askable: Set[str]) -> None:
    """Raises NoWorkerError if all workers that take requests lack the model."""
    if askable and askable <= lacks:
        raise NoWorkerError(f"no worker that serves {model!r} is up; retry")


def load_of(line: Sequence[Group]) -> tuple[int, int, float]:
    """Requests that wait or run in a line, at any stage, its slots, and what these end a second.

    The last is 0 while no request has ended there.
    """
    workers = [worker for group in line for worker in group.live_workers()]
    stages = [group.prefills for group in line if group.prefills is not None]
    waiting = line[0].line.waiting + sum(stage.line.waiting for stage in stages)
    prefilling = sum(worker.in_flight for stage in stages for worker in stage.workers.values())
    known = any(worker.service.known_per_s for worker in workers)
    return (
        waiting + prefilling + sum(worker.requests for worker in workers),
        sum(worker.slots for worker in workers),
        sum(worker.slots * worker.service.per_s for worker in workers) if known else 0.0,
    )
