"""Operation: how the router ends, its certificate, the path of requests, processes, its log."""

from __future__ import annotations

import ssl
from functools import cached_property
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from router.http.plane import DataPlane
from router.settings.checks import DAY_S, checked
from router.tls import read, server_context


class OperationSettings(BaseSettings):
    """Ending, TLS, the path of requests and the log; times in seconds."""

    drain_delay_s: float = Field(
        default=0.0,
        ge=0,
        le=DAY_S,
        description="After SIGTERM, how long new requests are still taken while /health says 503: "
        "the time that a load balancer needs to notice.",
    )
    grace_s: float = Field(
        default=30.0,
        ge=0,
        le=DAY_S,
        description="How long open answers may then go on; what is left gets an error.",
    )
    tls_cert: str | None = Field(
        default=None,
        description="PEM file with the certificate and its chain: the port then speaks HTTPS.",
    )
    tls_key: str | None = Field(
        default=None,
        validate_default=True,
        description="PEM file with its key, not encrypted; unset: it is in the same file.",
    )
    data_plane: DataPlane = Field(
        default=DataPlane.SPLICE,
        validate_default=True,
        description="How requests for answers of models pass through: from the client's connection "
        "to the engine's at once (splice), or by way of FastAPI like all others (asgi).",
    )
    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that pass requests and answers on. With more than one, one more "
        "decides for all of them; one that fails is started again, and the others go on.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged: debug, info, warning, error."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Lines of text for people, or of JSON."
    )

    @cached_property
    def certificate(self) -> tuple[bytes, bytes | None] | None:
        """Certificate and key as PEM, read once, so that all uses of these settings have the same.

        Raises:
            ConfigError: the files cannot be used.
        """
        return None if self.tls_cert is None else read(self.tls_cert, self.tls_key)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What clients are shown; None: the port speaks plain HTTP."""
        return None if self.certificate is None else server_context(*self.certificate)

    @field_validator("processes")
    @classmethod
    def _spliced_by_several(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("data_plane") is DataPlane.ASGI:
            raise ValueError("--processes above 1 needs --data-plane splice")
        return value

    @field_validator("tls_key")
    @classmethod
    def _usable_certificate(cls, value: str | None, info: ValidationInfo) -> str | None:
        cert = info.data.get("tls_cert")
        if cert is not None:
            checked(lambda key: read(cert, key), value)
        elif value is not None:
            raise ValueError("tls_key needs --tls-cert: the file with the certificate")
        return value
