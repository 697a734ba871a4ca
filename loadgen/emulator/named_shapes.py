"""Answers with named events, as in vLLM (0.32): messages and responses."""

from collections.abc import Sequence

import msgspec

from loadgen.emulator.generation import RejectedError
from loadgen.emulator.shapes import ChoiceEnd, KvParams, Usage

_encode = msgspec.json.encode
_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


def _event(name: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))


class MessageShape:
    """A message with one block of text; methods as in ``Shape``."""

    def __init__(self, answer_id: str, model: str, prompt_tokens: int) -> None:
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self._end = ChoiceEnd("", "stop", None)

    def first(self, choices: int) -> bytes:
        unknown: dict[str, object] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **unknown, "usage": self._usage(Usage(self._prompt_tokens, 0))}
        block = {"type": "text", "text": ""}
        start = _event("message_start", message=message)
        return start + _event("content_block_start", index=0, content_block=block)

    def delta(self, index: int, text: str) -> bytes:
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def last(self, index: int, end: ChoiceEnd) -> bytes:
        self._end = end
        return self.delta(0, end.text) + _event("content_block_stop", index=0)

    def close(self, usage: Usage, *, include_usage: bool) -> bytes:
        end = _event("message_delta", delta=self._stop(self._end), usage=self._usage(usage))
        return end + _event("message_stop")

    def fail(self, rejected: RejectedError) -> bytes:
        return _event("error", error={"type": "internal_error", "message": rejected.message})

    def whole(self, ends: Sequence[ChoiceEnd], usage: Usage, kv_params: KvParams) -> bytes:
        (end,) = ends
        told = {"content": [{"type": "text", "text": end.text}], **self._stop(end)}
        return _encode({**self._head, **told, "usage": self._usage(usage)})

    def _usage(self, usage: Usage) -> dict[str, int]:
        """Cached tokens are no input tokens here, as in Anthropic's API."""
        cached = {"cache_read_input_tokens": usage.cached} if usage.cached else {}
        counts = {"input_tokens": usage.prompt - usage.cached, "output_tokens": usage.completion}
        return counts | cached

    def _stop(self, end: ChoiceEnd) -> dict[str, object]:
        reason = "stop_sequence" if end.stop_reason else _STOP_REASONS[end.finish_reason]
        return {"stop_reason": reason, "stop_sequence": end.stop_reason}


class ResponseShape:
    """A response with one item of text; methods as in ``Shape``."""

    def __init__(self, answer_id: str, model: str, created: int) -> None:
        self._head = {"id": answer_id, "object": "response", "created_at": created, "model": model}
        self._head |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        self._item_id = f"msg_{answer_id}"
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._sequence = 0
        self._text: list[str] = []
        self._cut = False

    def first(self, choices: int) -> bytes:
        response = {**self._head, "status": "in_progress", "output": [], "usage": None}
        item = self._item("in_progress", [])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place, part=_part(""))
        )

    def delta(self, index: int, text: str) -> bytes:
        self._text.append(text)
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def last(self, index: int, end: ChoiceEnd) -> bytes:
        self._cut = end.finish_reason == "length"
        events = self.delta(0, end.text)
        text = "".join(self._text)
        item = self._item("completed", [text])
        return (
            events
            + self._event("response.output_text.done", **self._place, text=text, logprobs=[])
            + self._event("response.content_part.done", **self._place, part=_part(text))
            + self._event("response.output_item.done", output_index=0, item=item)
        )

    def close(self, usage: Usage, *, include_usage: bool) -> bytes:
        response = self._response("".join(self._text), usage)
        return self._event("response.completed", response=response)

    def fail(self, rejected: RejectedError) -> bytes:
        error = {"code": str(rejected.status), "message": rejected.message, "param": None}
        return self._event("error", **error)

    def whole(self, ends: Sequence[ChoiceEnd], usage: Usage, kv_params: KvParams) -> bytes:
        (end,) = ends
        self._cut = end.finish_reason == "length"
        return _encode(self._response(end.text, usage))

    def _response(self, text: str, usage: Usage) -> dict[str, object]:
        counts = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        }
        cut = {"reason": "max_output_tokens"} if self._cut else None
        return {
            **self._head,
            "status": "incomplete" if self._cut else "completed",
            "incomplete_details": cut,
            "output": [self._item("completed", [text])],
            "usage": counts,
        }

    def _item(self, status: str, texts: Sequence[str]) -> dict[str, object]:
        content = [_part(text) for text in texts]
        item = {"type": "message", "id": self._item_id, "role": "assistant"}
        return {**item, "status": status, "content": content}

    def _event(self, name: str, **fields: object) -> bytes:
        self._sequence += 1
        return _event(name, sequence_number=self._sequence - 1, **fields)


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
