"""Parts of the router that accept settings at run time: which settings, and what they change."""

import ssl

from router.config.live import Part
from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError
from router.dispatch.membership import Fleet
from router.engines.gauges import GaugeReader, GaugeSettings
from router.engines.health_checks import HealthMonitor, HealthSettings
from router.http import tls
from router.http.port import EndingSettings, Lifecycle
from router.proxy.context import RelayContext, RelaySettings
from router.recording.recorder import Recorder, Setting
from router.serve.access import Access


def recorded(settings: ServeSettings) -> Setting:
    """Settings that a recording's header shows."""
    return Setting("serve", settings.policy, settings.dispatch.value, settings.levels)


def watching(health: HealthMonitor, gauges: GaugeReader) -> Part:
    """Times of health checks and of metrics polling."""

    def take(settings: ServeSettings) -> None:
        health.settings = settings.of(HealthSettings)
        gauges.settings = settings.of(GaugeSettings)

    return Part(take)


def patience(relay: RelayContext) -> Part:
    """Attempts, timeouts and worker headers of new requests."""

    def take(settings: ServeSettings) -> None:
        relay.settings = settings.of(RelaySettings)

    return Part(take)


def workers(fleet: Fleet) -> Part:
    """The set of workers."""

    def take(settings: ServeSettings) -> None:
        fleet.change(settings.workers, settings.lockstep)

    def check(settings: ServeSettings) -> None:
        fleet.check(settings.workers)

    return Part(take, check)


def recording(recorder: Recorder) -> Part:
    """The header of recordings."""

    def take(settings: ServeSettings) -> None:
        recorder.change(recorded(settings))

    return Part(take)


def ending(lifecycle: Lifecycle) -> Part:
    """Times of the shutdown."""

    def take(settings: ServeSettings) -> None:
        lifecycle.settings = settings.of(EndingSettings)

    return Part(take)


def keys(access: Access) -> Part:
    """Keys; their files are read again even if their names are unchanged."""
    return Part(access.take, access.check, access.read_again)


def certificate(shown: ssl.SSLContext) -> Part:
    """The certificate for new clients, read again even if the file names are unchanged."""

    def check(settings: ServeSettings) -> None:
        if settings.certificate is None:
            raise ConfigError("tls_cert is gone: a port that speaks HTTPS does so until it ends")

    def take(settings: ServeSettings) -> None:
        if settings.certificate is not None:
            tls.load(shown, *settings.certificate)

    return Part(take, check, frozenset({"tls_cert", "tls_key"}))
