"""Operator actions on an engine: sleep, pause, load adapters; paths as in vLLM.

A new request waits while the engine sleeps or is paused; running answers continue.
"""

import asyncio

import msgspec

from loadgen.emulator.generation import RejectedError, decoded

_STOPS = {"/sleep": "is_sleeping", "/pause": "is_paused"}
_GOES_ON = {"/wake_up": "is_sleeping", "/resume": "is_paused"}
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ACTIONS = (*_STOPS, *_GOES_ON, _LOAD, _UNLOAD)


class _Adapter(msgspec.Struct):
    lora_name: str
    lora_path: str = ""


class Operated:
    """Operational state of one engine."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}  # path of each adapter, by name
        self.going = asyncio.Event()  # event, set while new answers may begin
        self.going.set()
        self._stopped: set[str] = set()

    def said(self, what: str) -> bytes:
        """As vLLM answers."""
        return msgspec.json.encode({what: what in self._stopped})

    def do(self, path: str, body: bytes) -> None:
        """Perform one of the ``ACTIONS``."""
        if path in _STOPS:
            self._stopped.add(_STOPS[path])
        elif path in _GOES_ON:
            self._stopped.discard(_GOES_ON[path])
        else:
            adapter = decoded(body, _Adapter)
            if path == _LOAD:
                self.adapters[adapter.lora_name] = adapter.lora_path
            elif self.adapters.pop(adapter.lora_name, None) is None:
                said = f"The lora adapter '{adapter.lora_name}' cannot be found."
                raise RejectedError(said, status=404)
        if self._stopped:
            self.going.clear()
        else:
            self.going.set()
