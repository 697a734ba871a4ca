"""Size of the prompt that a chat template builds: texts, tool calls and results, images.

One walk covers all dialects: clients mix them.
"""

import msgspec

from router.proxy.json_fields import ABSENT, Raw, given, items, json_bytes, start, text_bytes, true

# Bytes that a chat template adds to a message.
_BYTES_PER_MESSAGE = 16
# No message is deeper: part of a tool result in a message.
_DEEPEST = 6
# A larger value inside a message counts as an unread part.
_LARGE_BYTES = 4 * 1024 * 1024
# Types that become text; the others are images and the like.
_TEXTS = frozenset(
    b'"' + kind + b'"'
    for kind in (
        *(b"message", b"text", b"input_text", b"output_text", b"refusal"),
        *(b"thinking", b"reasoning", b"reasoning_text", b"summary_text"),
        *(b"function", b"function_call", b"function_call_output"),
        *(b"tool_use", b"tool_result"),
    )
)


class _Said(msgspec.Struct, gc=False):
    type: Raw = ABSENT
    content: Raw = ABSENT
    text: Raw = ABSENT
    name: Raw = ABSENT
    arguments: Raw = ABSENT
    input: Raw = ABSENT
    output: Raw = ABSENT
    tool_calls: Raw = ABSENT
    function: Raw = ABSENT
    function_call: Raw = ABSENT
    reasoning_content: Raw = ABSENT
    reasoning: Raw = ABSENT
    thinking: Raw = ABSENT
    summary: Raw = ABSENT
    refusal: Raw = ABSENT


_decoder = msgspec.json.Decoder(_Said)
_NESTED = ("function", "function_call")
_FIELDS = _Said.__struct_fields__[1:]


class Rendered:
    """A prompt's size, up to ``most`` messages and parts.

    ``parts``: images and the like. ``whole``: everything was counted.
    """

    def __init__(self, most: int) -> None:
        self.bytes = 0
        self.parts = 0
        self.whole = True
        self._left = most

    def add_messages(self, messages: Raw) -> None:
        """Messages, or a text that is the only one; TooManyError beyond ``most``."""
        if start(messages) == b'"':
            self.bytes += _BYTES_PER_MESSAGE + text_bytes(messages)
        elif start(messages) == b"[":
            for message in self._take(messages):
                self.bytes += _BYTES_PER_MESSAGE
                if message is not None:
                    self._add(message, 0)

    def add_content(self, content: Raw, depth: int = 0) -> None:
        """A text or a list of parts; TooManyError beyond ``most``."""
        if start(content) == b'"':
            self.bytes += text_bytes(content)
        elif start(content) == b"[" and depth and _large(content):
            self.parts += 1
            self.whole = False
        elif start(content) == b"[":
            for part in self._take(content):
                if depth < _DEEPEST and part is not None:
                    self._add(part, depth + 1)
                else:
                    self.whole = False

    def add_tools(self, tools: Raw) -> None:
        if true(tools):
            self.bytes += json_bytes(tools)

    def _take(self, raw: Raw) -> list[_Said | None]:
        try:
            taken = items(raw, self._left, _Said | None)
        except msgspec.ValidationError:
            each = items(raw, self._left)
            taken = [_decoder.decode(one) if start(one) == b"{" else None for one in each]
        self._left -= len(taken)
        return taken

    def _add(self, said: _Said, depth: int) -> None:
        kind = bytes(memoryview(said.type)[:32])
        called = given(said.function) or given(said.name)
        text = kind in _TEXTS if kind else depth == 0 or start(said.text) == b'"'
        if not (called or text):
            self.parts += 1
            return
        for name in _FIELDS:
            field: Raw = getattr(said, name)
            match start(field):
                case b'"' | b"[":
                    self.add_content(field, depth)
                case b"{" if name in _NESTED and depth < _DEEPEST and not _large(field):
                    self._add(_decoder.decode(field), depth + 1)
                case b"{":
                    self.bytes += json_bytes(field)
                case b"" | b"n":
                    pass
                case _:
                    self.whole = False


def _large(raw: Raw) -> bool:
    return memoryview(raw).nbytes > _LARGE_BYTES
