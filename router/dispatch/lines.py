"""Queues of groups that serve the same models: what waits is common to them."""

from collections.abc import Callable, Mapping, Sequence

from router.core.queue.pool import Pool
from router.core.rounds.sharing import Sharing
from router.core.state.cluster import Cluster
from router.core.types import Request
from router.dispatch.group_queue import GroupQueue, Waiting


class Lines:
    """Joins queues, and parts them; ``make_pool``: for a queue that waits alone again."""

    def __init__(self, cluster: Cluster, make_pool: Callable[[], Pool]) -> None:
        self._cluster = cluster
        self._make_pool = make_pool

    def draw(self, queues: Sequence[GroupQueue], home: Mapping[str, str]) -> None:
        """These queues alone have one line from now on; ``home``: the group of each model."""
        for queue in queues:
            for other in list(queue.joined):
                if other not in queues:
                    self._part(other, home)
        first, *others = queues
        for queue in others:
            if queue not in first.joined:
                _join(first, queue)

    def _part(self, queue: GroupQueue, home: Mapping[str, str]) -> None:
        """It takes along the requests whose model has its home there; the others keep the rest."""
        rest = [other for other in queue.joined if other is not queue]
        going = [request for request in queue.pool if self._goes(request, queue, rest, home)]
        for request in reversed(going):  # the last first: it has the fewest behind it
            queue.pool.remove(request.id)
        pool, waiters = self._make_pool(), dict[str, Waiting]()
        for request in going:
            pool.add(request)
            waiters[request.id] = queue.waiters.pop(request.id)
        _bind(rest, queue.pool, queue.waiters)
        queue.group.line.part(queue.group, len(pool))
        _bind([queue], pool, waiters)

    def _goes(
        self,
        request: Request,
        queue: GroupQueue,
        rest: Sequence[GroupQueue],
        home: Mapping[str, str],
    ) -> bool:
        """Whether a request leaves with the queue; count it at a group of its line from then on."""
        at = self._cluster.at(request)
        assert at is not None
        name = home.get(request.model, at.name)
        goes = name == queue.group.name
        names = [other.group.name for other in ([queue] if goes else rest)]
        self._cluster.move(request, name if name in names else names[0])
        for other in rest if goes else [queue]:
            other.group.prefixes.forget(request.id)
        return goes


def _join(first: GroupQueue, other: GroupQueue) -> None:
    for request in list(other.pool):
        first.pool.add(request)
    first.group.line.merge(other.group.line)
    _bind(first.joined + other.joined, first.pool, first.waiters | other.waiters)


def _bind(queues: list[GroupQueue], pool: Pool, waiters: dict[str, Waiting]) -> None:
    sharing = Sharing([queue.decider for queue in queues])
    for queue in queues:
        queue.pool, queue.waiters, queue.joined = pool, waiters, queues
        queue.decider.pool, queue.decider.sharing = pool, sharing
        queue.schedule(hurry=True)
