"""Addresses: where clients and operators reach the router."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from router.config.checks import checked
from router.http.loopback import loopback


class AddressSettings(BaseSettings):
    """Where the router listens."""

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

    @field_validator("admin_host")
    @classmethod
    def _guarded_or_loopback(cls, value: str, info: ValidationInfo) -> str:
        return value if info.data.get("admin_key_file") else checked(loopback, value)
