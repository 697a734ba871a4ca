"""The gRPC port for gateways: picks, the access log, and health."""

import logging
from collections.abc import MutableSet
from dataclasses import dataclass, field
from typing import Any

import grpc
from envoy.service.accesslog.v3.als_pb2_grpc import add_AccessLogServiceServicer_to_server
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    add_ExternalProcessorServicer_to_server,
)
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from router.pick.access_log import AccessLog
from router.pick.ext_proc import NAME, ExternalProcessor
from router.pick.picks import Picks

log = logging.getLogger(__name__)

_HEALTH = "grpc.health.v1.Health"
_LIVENESS = "liveness"
_SERVICES = frozenset({"", "readiness", NAME})


@dataclass(frozen=True, slots=True)
class GrpcPort:
    """Serves gateways while ``run`` runs.

    Attributes:
        address: host and port.
        certificate: certificate and key as PEM; None: without TLS.
        tasks: of open requests; the server waits for them at its end.
        most_wait_s: longest time for which a request is held.
        most_bytes: of a request's body.
    """

    picks: Picks
    address: str
    certificate: tuple[bytes, bytes | None] | None = field(repr=False)
    tasks: MutableSet[Any]
    most_wait_s: float
    most_bytes: int

    async def run(self) -> None:
        # A message may hold a whole body, one that is refused too, or an answer's.
        longest = ("grpc.max_receive_message_length", 2 * self.most_bytes + 2**20)
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0), longest))
        bounds = self.most_wait_s, self.most_bytes
        processor = ExternalProcessor(self.picks, self.tasks, *bounds)
        add_ExternalProcessorServicer_to_server(processor, server)
        add_AccessLogServiceServicer_to_server(AccessLog(self.picks), server)
        # Not by the generated function: a call that is not served would be an error in the log.
        check = grpc.unary_unary_rpc_method_handler(
            self._check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        )
        health = grpc.method_handlers_generic_handler(_HEALTH, {"Check": check})
        server.add_generic_rpc_handlers((health,))
        if self.certificate is None:
            server.add_insecure_port(self.address)
        else:
            cert, key = self.certificate
            shown = grpc.ssl_server_credentials(((key or cert, cert),))
            server.add_secure_port(self.address, shown)
        await server.start()
        log.info("gRPC for gateways: %s", self.address)
        try:
            await server.wait_for_termination()
        finally:
            await server.stop(None)

    async def _check(self, asked: Any, context: Any) -> Any:
        """SERVING or not; a router that does not decide is not asked."""
        if asked.service not in (_LIVENESS, *_SERVICES):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {asked.service!r}")
        well = asked.service == _LIVENESS or self.picks.ready
        state = HealthCheckResponse.SERVING if well else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=state)
