"""The gRPC port for gateways: picks, the access log, and health."""

import logging
from collections.abc import MutableSet
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from router.pick import access_log, ext_proc
from router.pick.picks import Picks

log = logging.getLogger(__name__)

_HEALTH = "grpc.health.v1.Health"
_LIVENESS = "liveness"
_SERVICES = frozenset({"", "readiness", ext_proc.NAME})


class GrpcPort:
    """Serves gateways while ``run`` runs.

    Args:
        address: host and port.
        certificate: certificate and key as PEM; None: without TLS.
        tasks: of open requests; the server waits for them at its end.
        most_wait_s: longest time for which a request is held.
        most_bytes: of a request's body.
    """

    def __init__(
        self,
        picks: Picks,
        address: str,
        certificate: tuple[bytes, bytes | None] | None,
        tasks: MutableSet[Any],
        most_wait_s: float,
        most_bytes: int,
    ) -> None:
        self._picks = picks
        self._address = address
        self._certificate = certificate
        self._processor = ext_proc.ExternalProcessor(picks, tasks, most_wait_s, most_bytes)
        # A message may hold a whole body, one that is refused too, or an answer's.
        self._longest = ("grpc.max_receive_message_length", 2 * most_bytes + 2**20)
        self._log = access_log.AccessLog(picks)

    async def run(self) -> None:
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0), self._longest))
        server.add_generic_rpc_handlers(self._handlers())
        if self._certificate is None:
            server.add_insecure_port(self._address)
        else:
            cert, key = self._certificate
            shown = grpc.ssl_server_credentials(((key or cert, cert),))
            server.add_secure_port(self._address, shown)
        await server.start()
        log.info("gRPC for gateways: %s", self._address)
        try:
            await server.wait_for_termination()
        finally:
            await server.stop(None)

    def _handlers(self) -> Any:
        processing = grpc.stream_stream_rpc_method_handler(
            self._processor.process,
            ext_proc.Message.FromString,
            ext_proc.Answered.SerializeToString,
        )
        logging_ = grpc.stream_unary_rpc_method_handler(
            self._log.stream,
            access_log.Message.FromString,
            access_log.Answer.SerializeToString,
        )
        checking = grpc.unary_unary_rpc_method_handler(
            self._check,
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )
        methods = (
            (*ext_proc.METHOD, processing),
            (*access_log.METHOD, logging_),
            (_HEALTH, "Check", checking),
        )
        return [
            grpc.method_handlers_generic_handler(service, {method: handler})
            for service, method, handler in methods
        ]

    async def _check(self, asked: Any, context: Any) -> Any:
        """SERVING or not; a router that does not decide is not asked."""
        if asked.service not in (_LIVENESS, *_SERVICES):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {asked.service!r}")
        well = asked.service == _LIVENESS or self._picks.ready
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if well else states.NOT_SERVING)
