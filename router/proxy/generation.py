"""The endpoints that generate: their requests wait in a pool for a slot of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Scope

from router.proxy import wishes
from router.proxy.asked import Asked
from router.proxy.bodies import with_field
from router.proxy.context import Serves, ServingContext
from router.proxy.dialects import COMPLETIONS, MESSAGES, RESPONSES, Dialect
from router.proxy.identity import identity_of
from router.proxy.parse import (
    ParsedRequest,
    RequestLimits,
    parse,
    parse_message,
    parse_response,
    too_many_slots,
)
from router.proxy.relay import Relay
from router.proxy.relay_context import RelayContext
from router.proxy.split import few_fields
from router.proxy.split_relay import SplitRelay
from router.request_log import follow
from router.types import Request as PoolRequest

# A larger body is read in several passes beside the event loop, which has its turn between them.
_LARGE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that generates.

    Attributes:
        parse: reads a request's body.
        dialect: of its answers.
    """

    parse: Callable[[bytes, RequestLimits], ParsedRequest] = parse
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


async def relay_of(context: ServingContext, scope: Scope, body: bytes) -> Serves:
    """What serves a request of these endpoints.

    Args:
        context: see ``ServingContext``.
        scope: the request's, as in ASGI.
        body: its body, whole.

    Raises:
        RequestError: it cannot be served as it stands.
        NoWorkerError: nobody serves anything yet.
    """
    endpoint, headers = ENDPOINTS[scope["path"]], scope["headers"]
    models = context.models
    if len(body) > _LARGE_BYTES:
        parsed = await asyncio.to_thread(endpoint.parse, body, models.limits)
    else:
        parsed = endpoint.parse(body, models.limits)
    model = models.resolve(parsed.model)
    if model is not None and model != parsed.model:
        body = with_field(body, "model", model)
    group = models.group(model)
    lacks = models.lacking(model)
    if (most := models.most_slots(group)) is not None and parsed.slots > most:
        raise too_many_slots(parsed.slots, most)
    prefills = models.prefills(group, lacks)
    if prefills is not None and not (_splittable(parsed, context.relay) and few_fields(body)):
        prefills = None
    identity, said = identity_of(scope), wishes.said(headers)
    metered = wishes.metered(said)
    if context.elsewhere is not None and (metered or prefills is not None):
        return context.elsewhere(scope, body)
    waiting = pool_request(
        parsed,
        partial(models.tokens, group),
        context.clock(),
        id=identity.token,
        group=prefills or group,
        priority=wishes.priority(said, parsed.priority),
        queue_timeout_s=wishes.timeout_s(said, wishes.QUEUE_TIMEOUT),
        metered=metered,
        tenant=scope.get("tenant", ""),
        lacks=lacks,
    )
    timeout_s = wishes.timeout_s(said, wishes.REQUEST_TIMEOUT)
    line = follow(scope, waiting, model, identity.name)
    asked = Asked(
        target(scope), body, headers, identity.client_id, endpoint.dialect, timeout_s, line
    )
    return (SplitRelay if prefills else Relay)(context.relay, waiting, asked)


def target(scope: Scope) -> str:
    """Path and query of a request, the latter byte for byte."""
    query = scope["query_string"].decode("latin-1")
    return f"{scope['path']}?{query}" if query else scope["path"]


def _splittable(parsed: ParsedRequest, relay: RelayContext) -> bool:
    """Whether one worker may compute a request's prompt, and another decode.

    KV that is handed to one engine request is let go as soon as it is fetched: vLLM's connectors
    have none for a second one (``n`` above 1), what is found by its content is there for all.
    """
    handed = relay.transfer is not None and relay.transfer.kept_s is not None
    return parsed.splittable and (parsed.slots == 1 or not handed)


def pool_request(
    parsed: ParsedRequest, tokens: Callable[[int, int], int], now_s: float, **known: Any
) -> PoolRequest:
    """A request as the pool knows it.

    Args:
        parsed: what its body says.
        tokens: what bytes of text, and parts that are none, come to in its group.
        now_s: when it has come.
        known: its other fields, as far as something is known of them.
    """
    learns = parsed.measured and not parsed.known_tokens
    fields: dict[str, Any] = {
        "id": "",
        "group": "",
        "prompt_tokens": parsed.known_tokens + tokens(parsed.text_bytes, parsed.parts),
        "slots": parsed.slots,
        "max_tokens": parsed.max_tokens,
        "priority": parsed.priority,
        "arrival_s": now_s,
        "text_bytes": parsed.text_bytes if learns else 0,
        "parts": parsed.parts if learns else 0,
        "exact": parsed.known_tokens > 0 and not parsed.text_bytes,
    }
    return PoolRequest(**fields | known)
