"""Builds the directory that the deciding process sends to proxies."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from router.processes.directory import Access, Directory, GroupCard, Patience, Serving
from router.serve.router import Router


class Teller:
    """Returns the current directory when called.

    Args:
        proxies: number of proxies that share the port's connections and the retry budget.
    """

    def __init__(self, router: Router, proxies: int) -> None:
        self._router = router
        self._proxies = proxies
        settings = router.reload.settings
        limits = settings.http_limits
        self._limits = replace(
            limits,
            max_connections=ceil(limits.max_connections / proxies),
            # Each proxy must have room for the largest body.
            max_bodies_bytes=max(ceil(limits.max_bodies_bytes / proxies), limits.max_body_bytes),
        )
        self._worker_key = settings.worker_key

    def __call__(self) -> Directory:
        router = self._router
        return Directory(
            groups=self._groups(),
            models=dict(router.models.by_group),
            absent=dict(router.models.absent),
            aliases=dict(router.models.aliases),
            limits=router.models.limits,
            known=tuple(router.models.known),
            ranked=frozenset(router.urls.shared),
            patience=self._patience(),
            access=self._access(),
            serving=self._serving(),
        )

    def _groups(self) -> dict[str, GroupCard]:
        router = self._router
        return {
            name: GroupCard(
                # Rounded, because it moves a little with every prompt.
                round(group.token_rate.bytes_per_token, 2),
                router.models.prefills(name, frozenset()),
                frozenset(group.askable),
                round(group.token_rate.tokens_per_part),
                group.most_slots,
            )
            for name, group in router.dispatcher.cluster.groups.items()
            if group.serves is None
        }

    def _patience(self) -> Patience:
        router = self._router
        settings = router.dispatcher.settings
        return Patience(
            relay=router.relay.settings,
            retry_budget=settings.retry_budget,
            retry_min_per_s=settings.retry_min_per_s / self._proxies,
        )

    def _access(self) -> Access:
        access = self._router.access
        keys = None if access.clients is None else tuple(access.clients.ring.by_name.values())
        return Access(keys, hidden=self._router.door is not None)

    def _serving(self) -> Serving:
        settings = self._router.reload.settings
        return Serving(
            limits=self._limits,
            tls=settings.certificate,
            ending=self._router.lifecycle.settings,
            log_level=settings.log_level,
            log_format=settings.log_format,
            worker_key=self._worker_key,
            connect_timeout_s=settings.connect_timeout_s,
        )
