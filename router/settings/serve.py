"""What ``evenstep serve`` can be told; ``sources`` reads it."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from router.admin.hosts import loopback
from router.settings.access import AccessSettings
from router.settings.balancing import BalancingSettings
from router.settings.checks import checked
from router.settings.engines import EngineSettings
from router.settings.faults import FaultSettings
from router.settings.limits import LimitSettings
from router.settings.operation import OperationSettings
from router.settings.requests import RequestSettings

PREFIX = "EVENSTEP_"


class ServeSettings(
    BalancingSettings,
    EngineSettings,
    FaultSettings,
    RequestSettings,
    OperationSettings,
    LimitSettings,
    AccessSettings,
):
    """Everything that ``evenstep serve`` can be told; times in seconds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on, 0 for any free one."
    )
    admin_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of the status page, 0 for any free one; unset: there is none.",
    )
    admin_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address of the status page: a loopback one, unless keys guard it.",
    )
    record: str | None = Field(
        default=None,
        description="File for a recording of lengths and times, without text, as --trace and "
        "diagnose read it; .gz: compressed. Replaced at every start.",
    )

    @property
    def secret_files(self) -> list[str]:
        """Files with keys that nobody else should read."""
        of_tls = self.tls_key or self.tls_cert  # without one of its own the key is in the other
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
        """Arguments alone; ``load_settings`` merges the sources and remembers which gave what."""
        return (init_settings,)

    @field_validator("admin_host")
    @classmethod
    def _guarded_or_loopback(cls, value: str, info: ValidationInfo) -> str:
        return value if info.data.get("admin_key_file") else checked(loopback, value)
