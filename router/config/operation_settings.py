"""Addresses and operation: where the router listens, how it ends, and its log."""

import ssl
from functools import cached_property
from typing import Literal

from pydantic import ValidationInfo, field_validator

from router.config.setting import DAY_S, IF_GIVEN, SettingGroup, checked, live, setting
from router.http.port import DataPlane, loopback
from router.http.tls import read, server_context
from router.tracing import endpoint_of


class AddressSettings(SettingGroup):
    """Addresses: where clients and operators reach the router."""

    host: str = setting("127.0.0.1", "Address to listen on.", metavar="H", min_length=1)
    port: int = setting(8000, "Port to listen on; 0: any free one.", between=(0, 65_535))
    grpc_port: int | None = setting(
        None,
        "Port that gateways ask by gRPC where a request is to go; unset: none, and no gateway may "
        "ask over HTTP either.",
        metavar="N",
        between=(1, 65_535),
    )
    admin_port: int | None = setting(
        None,
        "Port of the status page; 0: any free one; unset: no status page.",
        metavar="N",
        between=(0, 65_535),
    )
    admin_host: str = setting(
        "127.0.0.1",
        "Address of the status page; without keys, a loopback address.",
        metavar="H",
        min_length=1,
    )

    @field_validator("admin_host")
    @classmethod
    def _guarded_or_loopback(cls, value: str, info: ValidationInfo) -> str:
        return value if info.data.get("admin_key_file") else checked(loopback, value)


class OperationSettings(SettingGroup):
    """Operation: shutdown, certificate, data plane, recording and log of the router."""

    drain_delay_s: float = live(
        0.0,
        "After SIGTERM, time for which the router still accepts requests while /health answers "
        "503, so that a load balancer notices.",
        between=(0, DAY_S),
    )
    grace_s: float = live(
        30.0,
        "Time for which open answers may then go on; those left end with an error.",
        between=(0, DAY_S),
    )
    tls_cert: str | None = setting(
        None,
        "PEM file with the certificate and its chain; with it the port speaks HTTPS.",
        metavar="FILE",
        live=IF_GIVEN,
    )
    tls_key: str | None = setting(
        None,
        "PEM file with the certificate's key, not encrypted; unset: the key is in the "
        "certificate's file.",
        metavar="FILE",
        live=IF_GIVEN,
    )
    data_plane: DataPlane = setting(
        DataPlane.SPLICE,
        "Path of requests for answers of models: directly from the client's connection to the "
        "engine's (splice), or through FastAPI like all others (asgi).",
        metavar="splice|asgi",
    )
    record: str | None = setting(
        None,
        "File for a recording of lengths, times and which prompts begin alike, without text; "
        "--trace and diagnose read it. "
        "A name that ends in .gz is compressed. Each start replaces the file.",
        metavar="FILE",
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "Collector that takes traces over OTLP and HTTP: one span a request, and the client's "
        "trace context passed on to the engine. Needs the extra tracing; unset: no traces.",
        metavar="URL",
    )
    log_level: Literal["debug", "info", "warning", "error"] = live(
        "info",
        "Least severity that is logged: debug, info, warning, error.",
        metavar="LEVEL",
    )
    log_format: Literal["text", "json"] = live(
        "text", "Form of the log: lines of text, or of JSON.", metavar="text|json"
    )

    @cached_property
    def certificate(self) -> tuple[bytes, bytes | None] | None:
        """Certificate and key as PEM, read once so that all uses of these settings agree."""
        return None if self.tls_cert is None else read(self.tls_cert, self.tls_key)

    @property
    def tls(self) -> ssl.SSLContext | None:
        return None if self.certificate is None else server_context(*self.certificate)

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _collector(cls, value: str | None) -> str | None:
        return None if value is None else endpoint_of(value)

    @field_validator("tls_key")
    @classmethod
    def _usable_certificate(cls, value: str | None, info: ValidationInfo) -> str | None:
        cert = info.data.get("tls_cert")
        if cert is not None:
            checked(lambda key: read(cert, key), value)
        elif value is not None:
            raise ValueError("tls_key needs --tls-cert: the file with the certificate")
        return value
