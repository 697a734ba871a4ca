"""What the state machine over the cluster knows to be true of requests and streams."""

from dataclasses import dataclass, field

from router.core.types import Request, Snapshot


@dataclass
class Sent:
    """A request of the router's, and what has become of it."""

    request: Request
    worker: str
    exact_tokens: int
    on_its_way: bool = True
    all_heard: bool = True
    most_generated: int = 0

    @property
    def parts(self) -> list[str]:
        return [f"{i}_cmpl-{self.request.id}-0-1a2b3c4d" for i in range(self.request.slots)]

    @property
    def whole_tokens(self) -> int:
        return self.request.prompt_tokens * self.request.slots


@dataclass
class Wire:
    """The state stream of one worker: what is under way, and what was sent in this epoch."""

    under_way: list[Snapshot] = field(default_factory=list)
    sent: list[Snapshot] = field(default_factory=list)
    complete: set[str] = field(default_factory=set)

    def send(self, message: Snapshot) -> None:
        self.under_way.append(message)
        self.sent.append(message)
