"""Endpoints that generate: their requests wait in a pool for a worker's slot."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Scope

from router.core.prefix.sessions import session_content
from router.core.request_limits import RequestLimits
from router.core.types import Request as PoolRequest
from router.dispatch.models import Route
from router.proxy.body import ParsedRequest, parse, parse_message, parse_response, too_many_slots
from router.proxy.client_request import QUEUE_TIMEOUT, ClientRequest, head_of
from router.proxy.content import CachedAs
from router.proxy.context import RelayContext, Serves, ServingContext
from router.proxy.dialects import COMPLETIONS, MESSAGES, RESPONSES, Dialect
from router.proxy.json_fields import with_field
from router.proxy.kv_transfer import few_fields
from router.proxy.passed import Passed, passes_on
from router.proxy.prefill_relay import SplitRelay
from router.proxy.relay import Relay
from router.proxy.request_log import follow

# A larger body is parsed in a thread: the event loop can run. Tokenizing takes longer.
_LARGE_BYTES, _LARGE_TEXT_BYTES = 256 * 1024, 4 * 1024


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that generates."""

    parse: Callable[[bytes, RequestLimits, CachedAs], ParsedRequest] = parse
    dialect: Dialect = COMPLETIONS


ENDPOINTS = {
    "/v1/completions": Endpoint(),
    "/v1/chat/completions": Endpoint(),
    "/v1/responses": Endpoint(parse_response, RESPONSES),
    "/v1/messages": Endpoint(parse_message, MESSAGES),
}


def dialect_of(path: str) -> Dialect:
    """Error format for clients of a path."""
    return ENDPOINTS[path].dialect if path in ENDPOINTS else COMPLETIONS


# Makes what serves a request.
Make = Callable[[RelayContext, PoolRequest, ClientRequest], Serves]


async def relay_of(
    context: ServingContext,
    scope: Scope,
    body: bytes,
    make: Make | None = None,
    barred: Callable[[Route], frozenset[str]] = lambda route: route.lacks,
) -> Serves:
    """The relay of a request; RequestError: it is invalid; NoWorkerError: no model is known yet.

    ``make``: another than a relay; it sees to the prompt itself. ``barred``: workers that must not
    receive it.
    """
    endpoint, models, leading = ENDPOINTS[scope["path"]], context.models, context.relay.leading
    may_pass_on = make is None and passes_on(context.relay, scope)
    if may_pass_on and not leading.serves:
        return Passed(context.relay, scope, ClientRequest.read(scope, body, endpoint.dialect))
    if len(body) > (_LARGE_TEXT_BYTES if models.tokenizers else _LARGE_BYTES):
        parsed = await asyncio.to_thread(endpoint.parse, body, models.limits, models.cached_as)
    else:
        parsed = endpoint.parse(body, models.limits, models.cached_as)
    route = models.route(parsed.model)
    if route.model is not None and route.model != parsed.model:
        body = with_field(body, "model", route.model)
    if route.most_slots is not None and parsed.slots > route.most_slots:
        raise too_many_slots(parsed.slots, route.most_slots)
    prefills = route.prefills
    if prefills is not None and not (_splittable(parsed, context.relay) and few_fields(body)):
        prefills = None
    head, lacks = head_of(scope), barred(route)
    if context.relay.settings.client_ranks and (rank := head.rank()) is not None:
        lacks = models.all_but(route.group, rank, lacks)
    tenant, content, model = scope.get("tenant", ""), parsed.content, route.model or ""
    if content is None:
        key, salt = parsed.session
        content = session_content(tenant, head.session or key, salt, model.encode())
    waiting = pool_request(
        parsed,
        partial(models.tokens, route.group),
        context.clock(),
        id=head.token,
        group=prefills if prefills and make is None else route.group,
        priority=head.priority(parsed.priority),
        queue_timeout_s=head.timeout_s(QUEUE_TIMEOUT),
        metered=head.metered,
        tenant=tenant,
        targets=head.targets(scope.get("targets")),
        lacks=lacks,
        model=model,
        adapter=model if model in models.adapters else "",
        content=content,
    )
    asked = ClientRequest.read(scope, body, endpoint.dialect)
    asked.prefills = prefills
    if may_pass_on:
        asked.elsewhere = partial(Passed, context.relay, scope, asked)
    asked.line = follow(scope, waiting, route.model, head.name)
    return (make or (SplitRelay if prefills else Relay))(context.relay, waiting, asked)


def _splittable(parsed: ParsedRequest, relay: RelayContext) -> bool:
    # vLLM's connectors free handed-over KV at the first fetch: a second engine request (``n`` above
    # 1) would find none. KV found by content stays.
    handed = relay.transfer.kept_s is not None
    return parsed.splittable and (parsed.slots == 1 or not handed)


def pool_request(
    parsed: ParsedRequest,
    tokens: Callable[[int, int], int],
    now_s: float,
    id: str = "",  # noqa: A002 - the field's name
    group: str = "",
    **known: Any,
) -> PoolRequest:
    """The pool's request; ``tokens`` estimates from text bytes and other parts."""
    learns = parsed.measured and not parsed.known_tokens
    return PoolRequest(
        id=id,
        group=group,
        prompt_tokens=parsed.known_tokens + tokens(parsed.text_bytes, parsed.parts),
        slots=parsed.slots,
        max_tokens=parsed.max_tokens,
        arrival_s=now_s,
        text_bytes=parsed.text_bytes if learns else 0,
        parts=parsed.parts if learns else 0,
        exact=parsed.known_tokens > 0 and not parsed.text_bytes,
        **known,
    )
