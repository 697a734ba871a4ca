"""A Kubernetes Lease as the replicas' lock."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from router.core.clock import Clock
from router.core.tenure import Candidate, Record
from router.kubernetes import Kubernetes, KubernetesError
from router.replicas.leading import running_clock

_CONFLICT, _NOT_FOUND = 409, 404


@dataclass
class LeaseLock:
    """Written by compare-and-swap: the API refuses what is based on an older version."""

    _api: Kubernetes
    _namespace: str
    _name: str
    lease_s: float
    _clock: Clock = running_clock
    _candidate: Candidate = field(default_factory=Candidate)
    _own: dict[str, Any] | None = None  # as last written here

    @property
    def _folder(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"

    @property
    def period_s(self) -> float:
        """Another one's lease is looked at when it is over."""
        left_s = self._candidate.over_s - self._clock()
        return min(self.lease_s / 10, left_s) if left_s > 0 else self.lease_s / 10

    async def attempt(self, name: str) -> str:
        for _ in range(2):
            try:
                return await self._attempt(name)
            except KubernetesError as error:
                if error.status not in (_CONFLICT, _NOT_FOUND):
                    raise
        raise KubernetesError(_CONFLICT, f"lease {self._name}: others write it, too")

    async def _attempt(self, name: str) -> str:
        lease, self._own = self._own or await self._read(), None
        spec = lease.get("spec") or {}
        # A replica that has released it leaves this.
        new = "leaseTransitions" not in spec
        holder = None if new else spec.get("holderIdentity") or ""
        lasts_s = spec.get("leaseDurationSeconds") or self.lease_s
        record = Record(lease["metadata"]["resourceVersion"], holder, lasts_s)
        if not self._candidate.may_write(record, name, self._clock()):
            return holder or ""
        self._own = await self._write(lease, name)
        return name

    async def look(self) -> str:
        return (await self._read()).get("spec", {}).get("holderIdentity") or ""

    async def release(self, name: str) -> None:
        if self._own is not None:
            await self._write(self._own, "")

    async def aclose(self) -> None:
        await self._api.aclose()

    async def _read(self) -> dict[str, Any]:
        try:
            lease: dict[str, Any] = await self._api.ask("GET", f"{self._folder}/{self._name}")
        except KubernetesError as error:
            if error.status != _NOT_FOUND:
                raise
            # Without a holder: it may have been deleted while another one held it.
            kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            new = {**kind, "metadata": {"name": self._name}, "spec": {}}
            lease = await self._api.ask("POST", self._folder, new)
        return lease

    async def _write(self, lease: dict[str, Any], holder: str) -> dict[str, Any]:
        before = lease.get("spec") or {}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {**before, "holderIdentity": holder, "renewTime": now}
        spec["leaseDurationSeconds"] = int(self.lease_s)
        if holder != before.get("holderIdentity"):
            spec["acquireTime"] = now
            spec["leaseTransitions"] = before.get("leaseTransitions", 0) + 1
        path = f"{self._folder}/{self._name}"
        written: dict[str, Any] = await self._api.ask("PUT", path, {**lease, "spec": spec})
        return written
