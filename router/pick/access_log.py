"""Envoy's access log over gRPC: it tells the end of every request, exactly."""

from collections.abc import AsyncIterator
from typing import Any

from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogType
from envoy.service.accesslog.v3 import als_pb2

from router.core.worker_specs import authority
from router.pick.pick import Told
from router.pick.picks import Picks

_LEFT = ("downstream_connection_termination", "downstream_remote_reset")
_BROKEN = {
    "upstream_connection_failure": "no connection to it",
    "upstream_connection_termination": "it closed the connection",
    "upstream_remote_reset": "it reset the connection",
    "upstream_request_timeout": "it did not answer in time",
    "stream_idle_timeout": "it was silent for too long",
    "upstream_protocol_error": "its answer is not HTTP",
    "no_healthy_upstream": "the gateway does not know it, or holds it for unhealthy",
    "upstream_overflow": "the gateway has too many connections to it",
}


class AccessLog:
    """Takes the entries."""

    def __init__(self, picks: Picks) -> None:
        self._picks = picks

    async def StreamAccessLogs(  # noqa: N802 - as gRPC has it
        self, messages: AsyncIterator[Any], _: Any
    ) -> Any:
        self._picks.logs += 1
        try:
            async for message in messages:
                for entry in message.http_logs.log_entry:
                    self._take(entry)
        finally:
            self._picks.logs -= 1
        return als_pb2.StreamAccessLogsResponse()

    def _take(self, entry: Any) -> None:
        pick = self._picks.known(entry.request.request_id)
        if entry.common_properties.access_log_type == AccessLogType.DownstreamPeriodic:
            self._picks.shows_running = True
            if pick is not None:
                pick.logged = True
        elif pick is not None:
            self._picks.end(pick, told(entry), "log")


def told(entry: Any) -> Told:
    """What an entry says of its answer."""
    common, flags = entry.common_properties, entry.common_properties.response_flags
    took_s, first_s = _seconds(common.duration), None
    if common.HasField("time_to_first_upstream_rx_byte"):
        first_s = max(0.0, took_s - _seconds(common.time_to_first_upstream_rx_byte))
    at = common.upstream_remote_address.socket_address
    return Told(
        entry.response.response_code.value,
        authority(at.address, at.port_value) if at.address else "",
        first_s,
        client_left=any(getattr(flags, name) for name in _LEFT),
        broken=next((why for name, why in _BROKEN.items() if getattr(flags, name)), ""),
    )


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos / 1e9)
