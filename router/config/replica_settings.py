from typing import Annotated

from pydantic import ValidationInfo, field_validator

from router.config.discover_notation import Discover, parse_discover
from router.config.setting import SettingGroup, Words, checked, read_by, setting
from router.replicas.leading import Lock
from router.replicas.locks import lock_of


class ReplicaSettings(SettingGroup):
    """Cluster: replicas, of which one decides, and where workers are found."""

    kubernetes_api: str | None = setting(
        None,
        "URL of the Kubernetes API, as kubectl proxy prints it; unset: that of the cluster in "
        "which the router is a pod.",
        metavar="URL",
        pattern=r"^https?://",
    )
    replica_lease_s: int | None = setting(
        None,
        "After so long without a sign of the replica that decides another one may; unset: 10 for "
        "a file, 5 for a Lease.",
        between=(1, 300),
    )
    replica_lock: str | None = setting(
        None,
        "Lock that the replicas share: file:PATH, or a Kubernetes Lease. Unset: this router "
        "decides alone.",
        metavar="file:PATH|lease:NAMESPACE/NAME",
    )
    replica_url: str | None = setting(
        None,
        "URL at which the other replicas reach this one; unset: that of --host, or of this "
        "machine's address.",
        metavar="URL",
        pattern=r"^https?://",
    )

    discover: Annotated[Words, read_by(parse_discover)] = setting(
        (),
        "Where workers are found, besides those of --worker; may be repeated: "
        "endpointslices:NAMESPACE/SERVICE, lws:NAMESPACE/NAME (a LeaderWorkerSet), file:PATH "
        "(TOML or JSON) or dns:HOST:PORT, then any of ,port=N ,ranks=N ,shared_ranks=N and what "
        "--worker takes.",
        metavar="SOURCE",
    )

    @property
    def sources(self) -> list[Discover]:
        """Where workers are found."""
        return [parse_discover(text) for text in self.discover]

    @property
    def lock(self) -> Lock | None:
        """The replicas' lock."""
        if self.replica_lock is None:
            return None
        return lock_of(self.replica_lock, self.replica_lease_s, self.kubernetes_api)

    @field_validator("replica_lock")
    @classmethod
    def _usable_lock(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            checked(lambda text: lock_of(text, api=info.data.get("kubernetes_api")), value)
        return value
