"""The least that an endpoint picker over grpc.aio does: read a request, name the next engine.

python -m tests.support.router_bench.minimal_picker --port 9002 --engines 8101,8102
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from itertools import cycle
from typing import Any

import grpc
from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

DESTINATION = "x-gateway-destination-endpoint"


async def serve(port: int, engines: list[int]) -> None:
    turns = cycle(f"127.0.0.1:{each}" for each in engines)

    async def process(messages: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
        body = b""
        async for message in messages:
            kind = message.WhichOneof("request")
            if kind == "request_body":
                body += message.request_body.body
            last = kind == "request_body" and message.request_body.end_of_stream
            if last or (kind == "request_headers" and message.request_headers.end_of_stream):
                endpoint = next(turns)
                answer = pb.ProcessingResponse()
                answer.dynamic_metadata.update({"envoy.lb": {DESTINATION: endpoint}})
                told = answer.request_headers.response
                told.clear_route_cache = True
                named = HeaderValue(key=DESTINATION, raw_value=endpoint.encode())
                told.header_mutation.set_headers.add(header=named)
                yield answer
                if last:
                    answer = pb.ProcessingResponse()
                    piece = answer.request_body.response.body_mutation.streamed_response
                    piece.body, piece.end_of_stream = body, True
                    yield answer
            elif kind == "response_headers":
                yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())

    handler = grpc.stream_stream_rpc_method_handler(
        process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
    )
    name = "envoy.service.ext_proc.v3.ExternalProcessor"
    server = grpc.aio.server()
    handlers = grpc.method_handlers_generic_handler(name, {"Process": handler})
    server.add_generic_rpc_handlers((handlers,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int)
    parser.add_argument("--engines", help="ports, with commas")
    given = parser.parse_args()
    asyncio.run(serve(given.port, list(map(int, given.engines.split(",")))))
