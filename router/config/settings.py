"""All settings of ``evenstep serve``; ``sources`` reads them."""

from __future__ import annotations

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from router.config.access import AccessSettings
from router.config.addresses import AddressSettings
from router.config.balancing import BalancingSettings
from router.config.engines import EngineSettings
from router.config.faults import FaultSettings
from router.config.limits import LimitSettings
from router.config.operation import OperationSettings
from router.config.requests import RequestSettings

PREFIX = "EVENSTEP_"


class ServeSettings(
    AddressSettings,
    BalancingSettings,
    EngineSettings,
    FaultSettings,
    RequestSettings,
    OperationSettings,
    LimitSettings,
    AccessSettings,
):
    """All settings of ``evenstep serve``; times in seconds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )

    @property
    def secret_files(self) -> list[str]:
        """Files with keys that only the owner should be able to read."""
        of_tls = self.tls_key or self.tls_cert  # the key may be in the certificate's file
        files = (self.api_key_file, self.admin_key_file, self.worker_api_key_file)
        return [file for file in (*files, self.secret_key_file, of_tls) if file is not None]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use the arguments only: ``load_settings`` merges the sources and tracks their origin."""
        return (init_settings,)
