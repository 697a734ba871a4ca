"""Which group serves which model, as the engines say at ``/v1/models``."""

from __future__ import annotations

from collections.abc import Sequence

from router.cluster import Cluster
from router.errors import InvalidRequestError, NoWorkerError, UnknownModelError


class ModelTable:
    """Models by group; a model stays known while the workers that serve it are down.

    Args:
        cluster: for the groups and who belongs to them.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._group_of: dict[str, str] = {}

    @property
    def names(self) -> Sequence[str]:
        """All models that have been seen, in the order of their first being seen."""
        return list(self._group_of)

    def learn(self, worker_id: str, models: Sequence[str]) -> None:
        """A worker said what it serves; the first group to serve a model keeps it."""
        for model in models:
            group = self._cluster.group_of(worker_id)
            self._group_of.setdefault(model, (group.serves or group).name)

    def group(self, model: str | None) -> str:
        """The group for a request.

        Raises:
            InvalidRequestError: no model is named, and there are several groups.
            NoWorkerError: no worker has answered yet, so that nothing is known.
            UnknownModelError: no group serves it.
        """
        groups = [group.name for group in self._cluster.groups.values() if group.serves is None]
        if model is None and len(groups) == 1:
            return groups[0]
        if not self._group_of:
            raise NoWorkerError("no worker has answered yet; retry in a moment")
        if model is None:
            known = ", ".join(self._group_of)
            raise InvalidRequestError(f"name a 'model', one of: {known}", param="model")
        if model in self._group_of:
            return self._group_of[model]
        raise UnknownModelError(f"The model `{model}` does not exist.", param="model")
