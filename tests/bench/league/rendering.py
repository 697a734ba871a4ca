"""``evenstep emulate`` whose engines also tell a prompt's token ids, as vLLM's ``…/render`` does.

    python -m tests.bench.league.rendering emulate --workers 2 …

vllm-router asks every engine for the token ids of a text, and foretells cached prefixes from
nothing else. The ids are those of the engines' KV events. Real engines compute them on machines of
their own; here one process is all of them, and computes each text once.

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

_WITHOUT_BLOCKS = 0


def _rendered(
    parse: Callable[[bytes, Limits], Generation], body: bytes, limits: Limits
) -> list[dict[str, object]]:
    parsed = parse(body, replace(limits, block_tokens=_WITHOUT_BLOCKS))
    return [
        {
            "request_id": f"render-{index}",
            "token_ids": content.ids(0, tokens),
            "sampling_params": {"max_tokens": cap},
            "model": limits.model,
        }
        for index, (content, tokens, cap) in enumerate(
            zip(parsed.contents, parsed.prompt_tokens, parsed.caps, strict=True)
        )
    ]


@lru_cache(maxsize=16)
def completion(body: bytes, limits: Limits) -> bytes:
    """One object for each prompt."""
    return msgspec.json.encode(_rendered(parse_completion, body, limits))


@lru_cache(maxsize=16)
def chat(body: bytes, limits: Limits) -> bytes:
    """The one prompt's."""
    return msgspec.json.encode(_rendered(parse_chat, body, limits)[0])


def _first_engines_metrics(worker: EmulatedWorker, lateness: Lateness) -> bytes:
    return metrics.render_metrics(worker, lateness).replace(
        b'engine="%d"' % worker.rank, b'engine="0"'
    )


vars(worker_app)["render_metrics"] = _first_engines_metrics
# Before the emulator's application reads which paths there are.
BESIDE |= {"/v1/completions/render": completion, "/v1/chat/completions/render": chat}


if __name__ == "__main__":
    from router.cli import main

    main()
