"""State of one client's request: what the step loop has released, and what was already sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from loadgen.emulator.faults import Wire
from loadgen.emulator.generation import Generation
from loadgen.emulator.named_shapes import MessageShape, ResponseShape
from loadgen.emulator.shapes import ChoiceEnd, Shape, Usage
from loadgen.emulator.text import OutputPlan
from loadgen.engine.request import EngineRequest


@dataclass(slots=True, eq=False)
class Choice:
    """One output of an answer; it has an engine request of its own."""

    answer: Answer
    index: int
    request: EngineRequest
    plan: OutputPlan
    shown_tokens: int = 0  # tokens that the engine has released to the client's stream
    sent_tokens: int = 0  # tokens whose text was taken for sending
    sent_chars: int = 0
    confirmed_tokens: int = 0  # tokens whose text has been sent
    done: bool = False
    listed: bool = False

    def take(self) -> bytes:
        """The event with all text released since the last call."""
        text = self.plan.text(self.sent_tokens, self.shown_tokens)
        if self.plan.end_chars is not None:
            text = text[: max(0, self.plan.end_chars - self.sent_chars)]
        self.sent_tokens = self.shown_tokens
        self.sent_chars += len(text)
        if self.done:
            end = ChoiceEnd(text, self.plan.finish_reason, self.plan.stop_reason)
            return self.answer.shape.last(self.index, end)
        return self.answer.shape.delta(self.index, text)

    def whole(self) -> ChoiceEnd:
        self.sent_tokens = self.request.generated_tokens
        text = self._text(self.sent_tokens)
        return ChoiceEnd(text, self.plan.finish_reason, self.plan.stop_reason)

    @property
    def confirmed_text(self) -> str:
        return self._text(self.confirmed_tokens)

    def _text(self, tokens: int) -> str:
        return self.plan.text(0, tokens)[: self.plan.end_chars]


@dataclass(slots=True, eq=False)
class Answer:
    """All outputs of one client's request; a single coroutine waits for them."""

    generation: Generation
    shape: Shape | MessageShape | ResponseShape
    wire: Wire
    # Outputs; filled when the engine requests are made.
    choices: list[Choice] = field(default_factory=list)
    gone: bool = False
    failed: bool = False  # whether the engine gave up on the answer
    complete: bool = False  # whether the whole answer has been sent
    # Parameters of the KV that the first output left behind.
    kv_transfer_params: dict[str, object] | None = None
    _changed: list[Choice] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        return all(choice.done for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """Each prompt counts once, with the cached tokens of its first output."""
        first = self.choices[:: self.generation.n]
        return Usage(
            sum(self.generation.prompt_tokens),
            sum(choice.request.generated_tokens for choice in self.choices),
            sum(choice.request.cached_tokens for choice in first),
        )

    def show(self, choice: Choice, *, done: bool) -> None:
        """Release the tokens of a choice and wake the waiting coroutine."""
        choice.shown_tokens = choice.request.generated_tokens
        choice.done = done
        if not choice.listed:
            choice.listed = True
            self._changed.append(choice)
        self._wake()

    def abandon(self) -> None:
        self.gone = True
        self._wake()

    def fail(self) -> None:
        """The engine gave up on an output; the whole answer fails."""
        self.failed = True
        self._wake()

    def tear(self) -> None:
        """Write half of a next event to an open stream; drop all that was yet to be sent."""
        self._changed.clear()
        choice = next((choice for choice in self.choices if not choice.done), None)
        if self.generation.stream and choice is not None:
            event = self.shape.delta(choice.index, choice.plan.text(0, 1))
            self.wire.tear(b"%x\r\n%b\r\n" % (len(event), event))

    def confirm(self, choices: Iterable[Choice]) -> None:
        """The choices' text was written; it counts only while the connection stands."""
        if not self.wire.struck and not self.gone:
            for choice in choices:
                choice.confirmed_tokens = choice.sent_tokens
            self.complete = self.finished and not self.failed

    async def changes(self) -> list[Choice]:
        """Wait for choices with new tokens, of one or more steps; none: abandoned, or failed."""
        if not self._changed and not self.gone and not self.failed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        changed, self._changed = self._changed, []
        for choice in changed:
            choice.listed = False
        return changed

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
