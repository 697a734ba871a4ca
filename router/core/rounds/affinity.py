"""How much it matters which worker computes a prompt, since caches differ."""

from collections.abc import Iterable

from router.core.types import Hits, Request

# Weight of what went before, at each request: some thousand of them count.
_KEPT = 0.999

# From here on it is worth more to compute prompts where they are cached than to fill slots with
# prompts that end together. From the half to the double the simulated figures are much the same.
_LITTLE = 0.025


class Affinity:
    """Of the prompts sent lately.

    A prefix that all workers have cached, as that of a system prompt, does not count.
    """

    def __init__(self) -> None:
        self._prompts = 0.0
        self._differ = 0.0

    def see(self, sent: Iterable[Request], hits: Hits | None) -> None:
        """Requests as they are sent; ``hits`` before that."""
        if hits is None:
            return
        for request in sent:
            cached = hits(request)
            differ = max(cached) - sum(cached) / len(cached)
            self._prompts = _KEPT * self._prompts + request.prompt_tokens
            self._differ = _KEPT * self._differ + differ

    @property
    def share(self) -> float:
        """Part of their tokens that the best worker had cached, beyond the workers' mean."""
        return self._differ / self._prompts if self._prompts else 0.0

    @property
    def little(self) -> bool:
        return self.share < _LITTLE
