"""``evenstep emulate`` whose engines also tell a prompt's token ids, as vLLM's ``…/render`` does.

    python -m tests.bench.league.rendering emulate --workers 2 …

vllm-router asks every engine for the token ids of a text, and foretells cached prefixes from
nothing else. The ids are those of the engines' KV events. Real engines compute them on machines of
their own; here one process is all of them, in the event loop whose steps must not be late. So it
computes each text once, and keeps the answer as it is sent: that is 11 bytes a token and the
request's own four, 100 MB for all texts of a run with the longest prompts.

Their metrics say ``engine="0"``, as those of engines that have no other ranks: vllm-router's
program scheduling reads no other number.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import msgspec

from loadgen.emulator import metrics, worker_app
from loadgen.emulator.beside import BESIDE
from loadgen.emulator.emulated_worker import EmulatedWorker
from loadgen.emulator.generation import Generation, Limits, parse_chat, parse_completion
from loadgen.emulator.stepper import Lateness
from tests.bench.league.numbering import ids_of

_WITHOUT_BLOCKS = 0
# As many as are asked about at once, and more than most runs have: routers ask every engine for the
# ids of a text, and meanwhile for those of others.
_TEXTS = 4096


def _rendered(
    parse: Callable[[bytes, Limits], Generation], body: bytes, limits: Limits
) -> list[dict[str, object]]:
    parsed = parse(body, replace(limits, block_tokens=_WITHOUT_BLOCKS))
    return [
        {
            "request_id": f"render-{index}",
            "token_ids": ids_of(content, tokens),
            "sampling_params": {"max_tokens": cap},
            "model": limits.model,
        }
        for index, (content, tokens, cap) in enumerate(
            zip(parsed.contents, parsed.prompt_tokens, parsed.caps, strict=True)
        )
    ]


@lru_cache(maxsize=_TEXTS)
def completion(body: bytes, limits: Limits) -> bytes:
    """One object for each prompt."""
    return msgspec.json.encode(_rendered(parse_completion, body, limits))


@lru_cache(maxsize=_TEXTS)
def chat(body: bytes, limits: Limits) -> bytes:
    """The one prompt's."""
    return msgspec.json.encode(_rendered(parse_chat, body, limits)[0])


def _first_engines_metrics(worker: EmulatedWorker, lateness: Lateness) -> bytes:
    return metrics.render_metrics(worker, lateness).replace(
        b'engine="%d"' % worker.rank, b'engine="0"'
    )


_RENDERS = {"/v1/completions/render": completion, "/v1/chat/completions/render": chat}

vars(worker_app)["render_metrics"] = _first_engines_metrics
BESIDE |= _RENDERS
# The application has read which paths there are: without these it knows none of the new ones, and
# vllm-router takes ``/tokenize``, whose ids are not those of KV events.
vars(worker_app)["_POSTED"] |= set(_RENDERS)


if __name__ == "__main__":
    from router.cli import main

    main()
