"""The fault port: inject and end faults of workers, report the fleet's state.

``POST /workers/{rank}/fault`` with a JSON body (``kind`` and its parameters, see ``Fault``), ``POST
/workers/{rank}/restore``, ``GET /fleet``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from loadgen.emulator.asgi import json_response, refusal
from loadgen.emulator.faults import Fault
from loadgen.emulator.generation import RejectedError, decoded
from router.core.errors import EvenstepError

if TYPE_CHECKING:
    from loadgen.emulator.emulated_fleet import EmulatedFleet

_ACTION = re.compile(r"/workers/(\d+)/(fault|restore)")


class ControlApp:
    """ASGI application of the fault port."""

    def __init__(self, fleet: EmulatedFleet) -> None:
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await self._answer(request.method, request.url.path, await request.body())
            response = json_response(msgspec.json.encode(answer))
        except ClientDisconnect:
            return
        except RejectedError as rejected:
            response = refusal(rejected)
        except EvenstepError as error:
            response = refusal(RejectedError(str(error)))
        await response(scope, receive, send)

    async def _answer(self, method: str, path: str, body: bytes) -> dict[str, object]:
        if method == "GET" and path == "/fleet":
            return self._fleet.describe()
        action = _ACTION.fullmatch(path)
        if method != "POST" or action is None:
            raise RejectedError("Not Found", status=404)
        rank = int(action[1])
        if not self._fleet.has_rank(rank):
            raise RejectedError(f"no worker {rank}", "rank", status=404)
        if action[2] == "restore":
            await self._fleet.restore(rank)
            return {"rank": rank, "fault": None}
        fault = decoded(body, Fault)
        await self._fleet.inject(rank, fault)
        return {"rank": rank, "fault": fault.kind}
