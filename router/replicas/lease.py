"""A Kubernetes Lease as the replicas' lock."""

from datetime import UTC, datetime
from typing import Any

from router.core.clock import Clock
from router.core.tenure import Candidate, Record
from router.kubernetes import Kubernetes, KubernetesError
from router.replicas.leading import running_clock

_CONFLICT, _NOT_FOUND = 409, 404


class LeaseLock:
    """Written by compare-and-swap: the API refuses what is based on an older version."""

    def __init__(
        self,
        api: Kubernetes,
        namespace: str,
        name: str,
        lease_s: int,
        clock: Clock = running_clock,
    ) -> None:
        self.lease_s: float = lease_s
        self.period_s = lease_s / 10
        self._api = api
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._clock = clock
        self._candidate = Candidate()
        self._own: dict[str, Any] | None = None  # as last written here

    async def attempt(self, name: str) -> str:
        for _ in range(2):
            lease = self._own or await self._read()
            self._own = None
            spec = lease.get("spec") or {}
            holder = spec.get("holderIdentity") or ""
            lasts_s = spec.get("leaseDurationSeconds") or self.lease_s
            record = Record(lease["metadata"].get("resourceVersion", ""), holder, lasts_s)
            if not self._candidate.may_write(record, name, self._clock()):
                return holder
            try:
                self._own = await self._write(lease, name)
            except KubernetesError as error:
                if error.status != _CONFLICT:
                    raise
            else:
                return name
        raise KubernetesError(_CONFLICT, f"lease {self._name}: others write it, too")

    async def release(self, name: str) -> None:
        try:
            if self._own is not None:
                await self._write(self._own, "")
        finally:
            await self._api.aclose()

    async def _read(self) -> dict[str, Any]:
        try:
            lease: dict[str, Any] = await self._api.ask("GET", f"{self._folder}/{self._name}")
        except KubernetesError as error:
            if error.status != _NOT_FOUND:
                raise
            kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            lease = {**kind, "metadata": {"name": self._name}}
        return lease

    async def _write(self, lease: dict[str, Any], holder: str) -> dict[str, Any]:
        before = lease.get("spec") or {}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {**before, "holderIdentity": holder, "renewTime": now}
        spec["leaseDurationSeconds"] = int(self.lease_s)
        if holder != before.get("holderIdentity"):
            spec["acquireTime"] = now
            spec["leaseTransitions"] = before.get("leaseTransitions", 0) + 1
        new = "resourceVersion" not in lease["metadata"]
        path = self._folder if new else f"{self._folder}/{self._name}"
        written: dict[str, Any] = await self._api.ask(
            "POST" if new else "PUT", path, {**lease, "spec": spec}
        )
        return written
