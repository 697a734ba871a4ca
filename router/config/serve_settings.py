"""All settings of ``evenstep serve``; ``setting_sources`` reads them."""

from dataclasses import replace

from router.config.balancing_settings import BalancingSettings
from router.config.client_settings import AccessSettings, LimitSettings, RequestSettings
from router.config.engine_settings import EngineSettings
from router.config.fault_settings import FaultSettings
from router.config.operation_settings import AddressSettings, OperationSettings
from router.config.replica_settings import ReplicaSettings
from router.config.setting import SettingGroup
from router.http.port import HttpLimits


class ServeSettings(
    EngineSettings,
    AddressSettings,
    BalancingSettings,
    FaultSettings,
    RequestSettings,
    LimitSettings,
    AccessSettings,
    ReplicaSettings,
    OperationSettings,
):
    """All settings of ``evenstep serve``; times in seconds."""

    @property
    def http_limits(self) -> HttpLimits:
        """Limits of the port; all bodies together may be as long as one."""
        limits = self.of(HttpLimits)
        return replace(limits, max_bodies_bytes=max(limits.max_bodies_bytes, limits.max_body_bytes))

    @property
    def secret_files(self) -> list[str]:
        """Files with keys that only the owner should be able to read."""
        of_tls = self.tls_key or self.tls_cert  # the key may be in the certificate's file
        files = (self.api_key_file, self.admin_key_file, self.worker_api_key_file)
        return [file for file in (*files, self.secret_key_file, of_tls) if file is not None]


# Every setting, in the order of its groups; help and documents list them so.
GROUPS: tuple[type[SettingGroup], ...] = ServeSettings.__bases__
SETTINGS = {name: field for group in GROUPS for name, field in group.model_fields.items()}


def title_of(group: type[SettingGroup]) -> tuple[str, str]:
    """A group's title, and a sentence about it: the two parts of its docstring."""
    title, _, text = (group.__doc__ or "").partition(": ")
    return title, text[:1].upper() + text[1:]
