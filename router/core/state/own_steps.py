from router.core.types import Request


class OwnSteps:
    """Steps of engines that do not report them, from the output tokens of their requests.

    A step yields equally many tokens to each of n decoding requests: one request's token is an nth
    of a step. A request decodes from its first tokens on, so chunks of several tokens overstate
    steps somewhat.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._decoding = 0
        self._tokens_each = 0.0

    def receive(self, request: Request, tokens: int) -> None:
        if request.id not in self._slots:
            self._slots[request.id] = request.slots
            self._decoding += request.slots
        self._tokens_each += tokens / self._decoding

    def leave(self, request_id: str) -> None:
        self._decoding -= self._slots.pop(request_id, 0)

    def take(self, step_tokens: float) -> int:
        """Take the whole steps since the last call; the fraction is kept."""
        steps = int(self._tokens_each / step_tokens)
        self._tokens_each -= steps * step_tokens
        return steps
