"""What an operator has an engine do: sleep, pause and serve adapters, by vLLM's paths.

A request to an engine that sleeps or is paused waits; answers under way go on.
"""

from __future__ import annotations

import asyncio

import msgspec

from loadgen.emulator.generation import RejectedError

_STOPS = {"/sleep": "is_sleeping", "/pause": "is_paused"}
_GOES_ON = {"/wake_up": "is_sleeping", "/resume": "is_paused"}
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ACTIONS = (*_STOPS, *_GOES_ON, _LOAD, _UNLOAD)


class _Adapter(msgspec.Struct):
    lora_name: str
    lora_path: str = ""


class Operated:
    """One engine's state of that kind.

    Attributes:
        adapters: paths, by name.
        going: answers begin.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.going = asyncio.Event()
        self.going.set()
        self._stopped: set[str] = set()

    def said(self, what: str) -> bytes:
        """Whether it sleeps or is paused, as it is told."""
        return msgspec.json.encode({what: what in self._stopped})

    def do(self, path: str, body: bytes) -> None:
        """One of the ``ACTIONS``.

        Raises:
            RejectedError: it cannot be done.
        """
        if path in _STOPS:
            self._stopped.add(_STOPS[path])
        elif path in _GOES_ON:
            self._stopped.discard(_GOES_ON[path])
        else:
            self._change(path, body)
        if self._stopped:
            self.going.clear()
        else:
            self.going.set()

    def _change(self, path: str, body: bytes) -> None:
        try:
            adapter = msgspec.json.decode(body, type=_Adapter)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RejectedError(str(error)) from error
        if path == _LOAD:
            self.adapters[adapter.lora_name] = adapter.lora_path
        elif self.adapters.pop(adapter.lora_name, None) is None:
            said = f"The lora adapter '{adapter.lora_name}' cannot be found."
            raise RejectedError(said, status=404)
