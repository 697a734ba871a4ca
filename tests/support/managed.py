"""A dispatcher whose workers come and go."""

from typing import Any

from router.core.errors import ConfigError
from router.core.events import WorkerUp
from router.core.types import Outcome, Request, WorkerSpec
from router.dispatch.membership import Fleet
from router.engines.worker_identity import SharedUrls
from tests.support.dispatching import Rig


class Shared(SharedUrls):
    """Refuses a worker that is called so."""

    def join(self, spec: WorkerSpec) -> None:
        if spec.id == "bad":
            raise ConfigError("it cannot be had")
        super().join(spec)


class Managed(Rig):
    """A dispatcher whose workers come and go; what is broken off is remembered."""

    def __init__(self, slots: dict[str, int], **settings: Any) -> None:
        super().__init__(slots, **settings)
        groups = self.cluster.groups.values()
        specs = [worker.spec for group in groups for worker in group.workers.values()]
        self.broken: list[str] = []
        self.urls = Shared(specs)
        self.fleet = Fleet(
            self.cluster,
            self.dispatcher,
            (self.urls, Shared(specs)),
            lambda worker_id, _: self.broken.append(worker_id),
            specs,
        )

    @property
    def states(self) -> dict[str, str]:
        return {member.spec.id: member.state for member in self.fleet.members}

    def add(self, name: str, *, up: bool = True, **fields: Any) -> WorkerSpec:
        spec = worker(name, **fields)
        self.fleet.add(spec)
        if up:
            self.dispatcher.apply(WorkerUp(name))
        return spec

    def finish(self, asking: Request) -> None:
        self.dispatcher.end(asking, Outcome.COMPLETED)
        self.fleet.settle()


def worker(name: str, **fields: Any) -> WorkerSpec:
    return WorkerSpec(name, f"http://{name}:1", **{"slots": 1, **fields})
