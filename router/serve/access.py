import logging

from router.access.door import Door
from router.access.key_files import KEYS_VARIABLE, KeySource, key_source, warn_of_readers
from router.access.key_limits import KeyLimits
from router.access.key_ring import KeyRing
from router.config.live import Part
from router.config.serve_settings import ServeSettings
from router.core.clock import Clock

log = logging.getLogger(__name__)


class Access:
    """Clients' keys and operators' keys; ConfigError if they cannot be read.

    Where ``clients`` is None, no key is needed; without ``operators`` the admin port serves this
    machine only.
    """

    def __init__(self, settings: ServeSettings, clock: Clock) -> None:
        self.clients = key_source(settings.api_key_file, KEYS_VARIABLE)
        self.operators = key_source(settings.admin_key_file)
        self.limits = KeyLimits()
        self._clock = clock
        self._checked: list[tuple[KeySource, KeyRing]] = []
        self._engines_keyed = settings.worker_api_key_file is not None
        warn_of_readers(settings.secret_files)
        self._name()

    @property
    def part(self) -> Part:
        """Files are read again even if their names are the same; checks are not turned on later."""
        sources = {"api_key_file": self.clients, "admin_key_file": self.operators}
        given = frozenset(name for name, source in sources.items() if source is not None)
        return Part(self.take, self.check, given)

    def weight(self, tenant: str) -> float:
        return 1.0 if self.clients is None else self.clients.weight(tenant)

    @property
    def door(self) -> Door | None:
        """The check of keys; None: no key is needed, and credentials are passed on."""
        if self.clients is None and not self._engines_keyed:
            return None
        return Door(self.clients, self.limits, self._clock)

    def check(self, settings: ServeSettings) -> None:
        """Read the keys again, or raise ConfigError; ``take`` puts them in force."""
        files = ((self.clients, settings.api_key_file), (self.operators, settings.admin_key_file))
        self._checked = [(source, source.read(file)) for source, file in files if source]

    def take(self, settings: ServeSettings) -> None:
        """Requests of removed keys go on."""
        for source, ring in self._checked:
            if changes := ring.changes_since(source.ring):
                whose = "clients" if source is self.clients else "operators"
                log.info("keys of %s: %s", whose, changes)
            source.ring = ring
        self._name()
        warn_of_readers(settings.secret_files)

    def _name(self) -> None:
        ring = KeyRing() if self.clients is None else self.clients.ring
        self.limits.name(ring.by_name)
