"""The endpoints that generate: their requests wait in a pool for a slot of a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from fastapi import FastAPI, Request, Response
from starlette.routing import Route

from router.group import Group
from router.proxy import wishes
from router.proxy.asked import Asked
from router.proxy.bodies import with_field
from router.proxy.context import AppContext
from router.proxy.dialects import COMPLETIONS, MESSAGES, RESPONSES, Dialect
from router.proxy.identity import identity_of
from router.proxy.parse import ParsedRequest, parse, parse_message, parse_response
from router.proxy.relay import Relay
from router.proxy.relay_context import RelayContext
from router.proxy.split_relay import SplitRelay
from router.request_log import follow
from router.types import Request as PoolRequest


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that generates.

    Attributes:
        parse: reads a request's body.
        dialect: of its answers.
    """

    parse: Callable[[bytes], ParsedRequest] = parse
    dialect: Dialect = COMPLETIONS


ENDPOINTS = {
    "/v1/completions": Endpoint(),
    "/v1/chat/completions": Endpoint(),
    "/v1/responses": Endpoint(parse_response, RESPONSES),
    "/v1/messages": Endpoint(parse_message, MESSAGES),
}


def dialect_of(path: str) -> Dialect:
    """How clients of a path expect an error."""
    return ENDPOINTS[path].dialect if path in ENDPOINTS else COMPLETIONS


def add_generation(app: FastAPI, context: AppContext) -> None:
    """Give an application these endpoints."""
    for path, endpoint in ENDPOINTS.items():
        answer = partial(_generate, context, endpoint)
        app.router.routes.append(Route(path, answer, methods=["POST"]))


async def _generate(context: AppContext, endpoint: Endpoint, request: Request) -> Response:
    body = await request.body()
    parsed = endpoint.parse(body)
    model = context.models.resolve(parsed.model)
    if model is not None and model != parsed.model:
        body = with_field(body, "model", model)
    cluster = context.dispatcher.cluster
    group = cluster.groups[context.models.group(model)]
    identity = identity_of(request.scope)
    waiting = replace(
        pool_request(parsed, group, context.clock()),
        id=identity.token,
        priority=wishes.priority(request.headers, parsed.priority),
        queue_timeout_s=wishes.timeout_s(request.headers, wishes.QUEUE_TIMEOUT),
        metered=request.headers.get("x-evenstep-energy") == "1",
        tenant=request.scope.get("tenant", ""),
    )
    timeout_s = wishes.timeout_s(request.headers, wishes.REQUEST_TIMEOUT)
    asked = Asked(target(request), body, identity.client_id, endpoint.dialect, timeout_s)
    relay = Relay
    prefills = cluster.prefill_group(group.name)
    if prefills is not None and _splits(parsed, context.relay):
        relay, waiting = SplitRelay, replace(waiting, group=prefills.name)
    follow(request.scope, waiting, model, identity.name)
    # Starlette only calls what it is given as an ASGI application, which a relay is.
    return cast(Response, relay(context.relay, waiting, asked))


def target(request: Request) -> str:
    """Path and query, the latter byte for byte."""
    query = request.scope["query_string"].decode("latin-1")
    return f"{request.scope['path']}?{query}" if query else request.scope["path"]


def _splits(parsed: ParsedRequest, relay: RelayContext) -> bool:
    """Whether one worker is to compute a request's prompt, and another to decode.

    KV that is handed to one engine request is let go as soon as it is fetched: vLLM's connectors
    have none for a second one (``n`` above 1), what is found by its content is there for all.
    """
    handed = relay.transfer is not None and relay.transfer.kept_s is not None
    return parsed.splittable and (parsed.slots == 1 or not handed)


def pool_request(parsed: ParsedRequest, group: Group, now_s: float) -> PoolRequest:
    """A request as the pool knows it, as yet without a name."""
    return PoolRequest(
        id="",
        group=group.name,
        prompt_tokens=parsed.known_tokens + group.token_rate.tokens(parsed.text_bytes),
        slots=parsed.slots,
        max_tokens=parsed.max_tokens,
        priority=parsed.priority,
        arrival_s=now_s,
        text_bytes=parsed.text_bytes if parsed.text_only and not parsed.known_tokens else 0,
        exact=parsed.known_tokens > 0 and not parsed.text_bytes,
    )
