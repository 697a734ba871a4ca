"""What the router learns of a group: completions per second and slot, bytes per token, delays.

Completions over slot time in use is the maximum-likelihood rate of exponential service. Running and
aborted requests count with their time (they are censored). Old completions decay.
"""

from __future__ import annotations

import math

# Completions after which an older one counts 1/e: a rate is known to 1 / sqrt(1000) = 3 %.
MEMORY = 1000.0
# Steps, of one engine each, after which an older one counts 1/e for the growth.
GROWTH_STEPS = 1000.0
# Weight of the expected rate, in completions.
EVIDENCE = 20.0


# Requests after which an older one counts 1/e for the delay, the most steps that one counts, and
# the most above the mean: one stray request says little.
_DELAYS, _LONGEST_DELAY, _STRAY = 32, 16, 8


class SendDelay:
    """Steps that an engine begins before a request that is sent to it arrives.

    When a step's end is known, its engine has begun the next: so one, until requests tell more. A
    router or a network that is slow beside the steps makes it several. What is sent at a step's end
    counts: in the midst of a step it is half a step more, on the mean. A part of a step counts as a
    whole one: what is sent too early is chosen a step early, what is sent too late costs a step.
    """

    def __init__(self, steps: int = 1) -> None:
        self._mean = float(steps)

    @property
    def steps(self) -> int:
        return math.ceil(self._mean - 0.25)

    def learn(self, steps: float) -> None:
        """Learn from a request that nothing but its way held up; far below 0 after a restart."""
        if steps >= -1:
            counted = min(max(0.0, steps), _LONGEST_DELAY, self._mean + _STRAY)
            self._mean += (counted - self._mean) / _DELAYS


class GroupRates:
    """Common deviation of a group's workers from their plans.

    If all plans are wrong by one factor (completions per expected completion), they still rank
    workers without completions. Without a plan a new worker is expected to be as fast as the group.
    ``version`` changes with any worker's rate. ``delay``: of what is sent to its workers.
    """

    def __init__(self) -> None:
        self._members: list[ServiceRate] = []
        self._expected = 0.0
        self._completions = 0.0
        self._worth = 1.0
        self.factor = 1.0
        self.version = 0
        self.delay = SendDelay()

    def join(self, planned: float | None) -> ServiceRate:
        member = ServiceRate(self, planned)
        self._members.append(member)
        self._settle()
        return member

    def leave(self, member: ServiceRate) -> None:
        self._members.remove(member)
        self._settle()

    def amend(self, member: ServiceRate, planned: float | None) -> None:
        member.planned = planned
        self._settle()

    def add(self, expected: float, completions: float) -> None:
        self._expected += expected
        self._completions += completions
        self.factor = (self._worth + self._completions) / (self._worth + self._expected)
        self.version += 1

    def _settle(self) -> None:
        """Workers without a plan are expected to match the mean plan."""
        plans = [each.planned for each in self._members if each.planned is not None]
        self._worth = EVIDENCE if plans else 1.0
        mean = sum(plans) / len(plans) if plans else 1.0
        for member in self._members:
            member.expected = mean if member.planned is None else member.planned
        self._completions = sum(each.completions for each in self._members)
        self._expected = sum(each.expected * each.busy_s for each in self._members)
        self.add(0.0, 0.0)


class ServiceRate:
    """Service rate of one worker; ``GroupRates.join`` makes it.

    Attributes:
        completions, busy_s: engine requests, and slot-seconds in use, with the same decay.
    """

    def __init__(self, group: GroupRates, planned: float | None) -> None:
        self.planned = planned  # requests per second and slot; None: not planned
        self.expected = 1.0  # the same before any completion
        self.completions = self.busy_s = 0.0
        self.group = group
        self._requests = self._slots = 0
        self._since_s: float | None = None

    def estimate(self) -> tuple[float, float]:
        """Mu, requests per second and slot, and the learned part's relative standard error."""
        prior = self.expected * self.group.factor
        evidence = EVIDENCE + self.completions
        per_s = prior * evidence / (EVIDENCE + prior * self.busy_s)
        return per_s, math.sqrt(self.completions) / evidence

    @property
    def per_s(self) -> float:
        return self.estimate()[0]

    @property
    def known_per_s(self) -> float | None:
        return None if self.planned is None and not self.completions else self.per_s

    def sent(self, requests: int, slots: int, now_s: float | None) -> None:
        """Count engine requests; ``now_s`` None: unknown."""
        self._look(now_s)
        self._requests += requests
        self._slots = slots

    def gone(self, requests: int, now_s: float | None, *, complete: bool) -> None:
        self._look(now_s)
        self._requests -= requests
        if complete and now_s is not None:
            kept, before_s, before = math.exp(-requests / MEMORY), self.busy_s, self.completions
            self.busy_s *= kept
            self.completions = kept * before + requests
            self.group.add(self.expected * (self.busy_s - before_s), self.completions - before)

    def _look(self, now_s: float | None) -> None:
        """Add slot time; requests that queue in the engine hold no slot."""
        if now_s is not None and self._since_s is not None and self._requests:
            busy_s = min(self._requests, self._slots) * max(0.0, now_s - self._since_s)
            self.busy_s += busy_s
            self.group.add(self.expected * busy_s, 0.0)
        self._since_s = now_s


# English text, with the weight of a short prompt.
_BYTES_PER_TOKEN = 4.0
_PRIOR_BYTES = 400.0
# Number of prompts remembered: traffic changes over the day.
_PROMPTS = 200


class TokenRate:
    """Bytes per token of one model's prompts, chat templates included, and tokens of an image.

    A ratio of two sums, not a mean of ratios: so estimates add up to the true load.
    """

    def __init__(self) -> None:
        self._bytes = _PRIOR_BYTES
        self._tokens = _PRIOR_BYTES / _BYTES_PER_TOKEN
        self._parts = self._part_tokens = 0.0

    @property
    def bytes_per_token(self) -> float:
        return self._bytes / self._tokens

    @property
    def tokens_per_part(self) -> float:
        """0 until an image or other media has been counted."""
        return self._part_tokens / self._parts if self._parts else 0.0

    def tokens(self, text_bytes: int, parts: int = 0) -> int:
        per_part = self.tokens_per_part if parts else 0.0
        return math.ceil(text_bytes / self.bytes_per_token + parts * per_part)

    def learn(self, text_bytes: int, tokens: int, parts: int = 0) -> None:
        """With images, the text's tokens are estimated, and the rest counts as the images'."""
        kept = 1 - 1 / _PROMPTS
        if parts > 0:
            left = max(0.0, tokens - text_bytes / self.bytes_per_token)
            self._parts = kept * self._parts + parts
            self._part_tokens = kept * self._part_tokens + left
        elif text_bytes > 0 and tokens > 0:
            self._bytes = kept * self._bytes + text_bytes
            self._tokens = kept * self._tokens + tokens


class Growth:
    """Output tokens per request in decode and step; old steps decay."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._requests = 0.0

    @property
    def mean(self) -> float:
        return self._tokens / self._requests if self._requests else 1.0

    def add(self, tokens: int, requests: int) -> None:
        if requests > 0:
            self._tokens += max(0, tokens) - self._tokens / GROWTH_STEPS
            self._requests += requests - self._requests / GROWTH_STEPS
