"""Prompts as emulated engines count and number their tokens, for choosers behind the relay."""

from loadgen.emulator.generation import (
    Generation,
    Limits,
    RejectedError,
    parse_chat,
    parse_completion,
)
from tests.bench.league.numbering import ids_of
from tests.bench.league.relay import Asked

_LONGEST = 1 << 40


class Reader:
    """Reads requests as emulated engines do."""

    def __init__(self, model: str) -> None:
        self._limits = Limits(model, _LONGEST, seed=0)

    def parsed(self, asked: Asked) -> Generation | None:
        """None: an engine would refuse it."""
        parse = parse_chat if asked.path.startswith("/v1/chat/") else parse_completion
        try:
            return parse(asked.body, self._limits)
        except RejectedError:
            return None


def token_ids(parsed: Generation) -> list[int]:
    """Of the prompt; several prompts count as one after the other."""
    pairs = zip(parsed.contents, parsed.prompt_tokens, strict=True)
    return [id_ for content, tokens in pairs for id_ in ids_of(content, tokens)]
