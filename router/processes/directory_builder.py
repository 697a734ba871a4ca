from dataclasses import replace
from math import ceil

from router.processes.directory import Access, Directory, GroupCard, Patience, Serving
from router.serve.router import Router


class Teller:
    """Builds the directory of ``proxies``, which share the port's connections and retry budget."""

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
        router, models, settings = self._router, self._router.models, self._router.reload.settings
        keys = router.access.clients
        return Directory(
            groups={
                group.name: GroupCard(
                    # Rounded, because it moves a little with every prompt.
                    bytes_per_token=round(group.token_rate.bytes_per_token, 2),
                    prefills=models.prefills(group.name, frozenset()),
                    askable=frozenset(models.askable(group.name)),
                    tokens_per_part=round(group.token_rate.tokens_per_part),
                    most_slots=models.most_slots(group.name),
                    ranks=models.ranks(group.name),
                    asks=models.asks_any(group.name),
                )
                for group in router.cluster.answering
            },
            models=dict(models.by_group),
            absent=dict(models.absent),
            adapters=models.adapters,
            aliases=dict(models.aliases),
            tokenizers=dict(models.tokenizers),
            divided=frozenset(models.divided),
            limits=models.limits,
            known=tuple(models.known),
            ranked=frozenset(router.urls.shared),
            patience=Patience(
                relay=router.relay.settings,
                retry_budget=router.dispatcher.settings.retry_budget,
                retry_min_per_s=router.dispatcher.settings.retry_min_per_s / self._proxies,
            ),
            access=Access(
                keys=None if keys is None else tuple(keys.ring.by_name.values()),
                hidden=router.door is not None,
            ),
            serving=Serving(
                limits=self._limits,
                tls=settings.certificate,
                ending=router.lifecycle.settings,
                log_level=settings.log_level,
                log_format=settings.log_format,
                worker_key=self._worker_key,
                connect_timeout_s=settings.connect_timeout_s,
            ),
        )
