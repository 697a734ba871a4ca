"""Of which workers the prefix caches are guessed, and what requests leave in them."""

from router.core.prefix.prefixes import Prefixes
from router.core.prefix.sent_prompts import MOST_TOKENS
from router.core.state.worker import Worker
from router.core.types import Content, Request


def guessed(prefixes: Prefixes, worker: Worker, content: Content | None = None) -> bool:
    """Whether it computes prompts, and may cache this one without telling."""
    # First what is false of all workers with the plug-in: each request asks of all of them.
    unheard = prefixes.guesses(worker.spec.id, content)
    return unheard and worker.live and worker.spec.role != "decode" and _caches(worker)


def _caches(worker: Worker) -> bool:
    gauges = worker.foreign.gauges
    return gauges is None or gauges.caches_prefixes


def sent(prefixes: Prefixes, worker: Worker, request: Request, cached: int | None) -> None:
    """A request leaves for a worker that has so much of its prompt cached, if known."""
    prefixes.sent(worker.spec.id, request)
    if guessed(prefixes, worker, request.content):
        prefixes.guessed_tokens += cached or 0


def computed(prefixes: Prefixes, worker: Worker, request: Request, now_s: float | None) -> None:
    """A prompt is computed: only now others find it cached."""
    if guessed(prefixes, worker, request.content):
        _leaves(prefixes, worker, request, request.prompt_tokens, now_s)


def ended(
    prefixes: Prefixes, worker: Worker, request: Request, *, complete: bool, now_s: float | None
) -> None:
    """A request ends, and the worker still counts it: a session goes on with the whole answer.

    Not where the engine has refused it: then it has computed nothing.
    """
    prefixes.ended(request.id)
    content = request.content
    if not complete or worker.has_refused(request.id):
        return
    if content is not None and content.session and guessed(prefixes, worker, content):
        prompt, outputs = worker.served(request.id, complete=True)
        _leaves(prefixes, worker, request, prompt + outputs // request.slots, now_s)


def read(prefixes: Prefixes, worker: Worker) -> None:
    """Its gauges are new: an engine that caches nothing has nothing cached."""
    if not _caches(worker) and prefixes.guesses(worker.spec.id):
        prefixes.lost(worker.spec.id)


def _leaves(
    prefixes: Prefixes, worker: Worker, request: Request, tokens: int, now_s: float | None
) -> None:
    gauges = worker.foreign.gauges
    most = (gauges.kv_tokens if gauges is not None else 0) or MOST_TOKENS
    if request.content is not None:
        prefixes.guess(worker.spec.id, request.content, tokens, now_s, most)
