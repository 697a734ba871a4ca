"""What the league's requests and engines are: all of it from a seed.

Prompts are text, of which four characters are a token in emulated engines, and nearly so in real
ones. Where they share a beginning, they share it to the character, so that routers that know texts
alone see it too.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from loadgen.emulator.text import CHARS_PER_TOKEN
from loadgen.traces.trace import TraceRequest, load_trace

# What every client sends as its API key, by tenant; a router may take them as its keys.
KEYS = {"one": "sk-league-one-0123456789abcdef", "flood": "sk-league-flood-0123456789abcdef"}

# Each with the space behind it is a token of a trained tokenizer, and four characters.
_LIST = (
    "the and for are but not you all any can had her was one our out day get has him his how "
    "man new now old see two way who boy did its let put say she too use air ask bad bag bar "
    "bed big bit box bus buy car cat cut dog dry due ear eat egg end eye far few fit fly fun "
    "gas got guy hit hot ice job key kid law lay leg lie lot low map may mix net nor off oil "
    "own pay per pop red rid row run sad sea set sit six sky son sun tax tea ten top try war "
    "wet why win yes yet "
)
_WORDS = _LIST.split()
_BANK_WORDS = 1 << 16
_LONGEST_PIECE = 20_000
_NAME_WORDS = 5  # of 115 words: more than 1 << 32
_SPREAD, _HASH = 40_503, 2_654_435_761  # odd: neighbouring keys begin far apart
_OWN_KEYS = 1 << 24  # above all ids of blocks


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        prompt: its text.
        output_tokens: that the engine answers with; routers cannot see it.
        wait_s: engine seconds: of a session's first request from the start, of each further one
            from the answer before it.
        tenant: a key of ``KEYS``.
    """

    prompt: str
    output_tokens: int
    wait_s: float = 0.0
    tenant: str = "one"


# Requests that each wait for the answer before them; all prompts begin alike.
Session = Sequence[Ask]


@dataclass(frozen=True, slots=True)
class FaultAt:
    """A fault of a rank; engine seconds since the start."""

    rank: int
    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Engines, and what is asked of them.

    Attributes:
        name: of its file and on the page.
        what: what it stands for, a sentence.
        sessions: requests of a seed.
        ranks: number of engines.
        slots: of each engine.
        time_scale: wall seconds per engine second.
        fleet: further flags of ``evenstep emulate``.
        engine_s: engine seconds that it takes, about.
        targets_ms: of a good request, as ``evenstep replay --goodput``.
        clients: that each wait for their answer; 0: requests come by their times.
        warmup: share of the sessions, the first ones, of whose requests no figure counts any: a
            router's start is not judged, and all routers' figures are of the same requests. Of
            clients that wait, figures count what ends after these were sent, until the last one
            is sent.
        faults: during it.
        tenants: whether there are several.
        open: whether all are single requests that come by their times.
        first_by: figure by which entrants are ordered; ``-`` before it: the most is first.
    """

    name: str
    what: str
    sessions: Callable[[int], Sequence[Session]]
    ranks: int
    slots: int
    time_scale: float
    fleet: Sequence[str]
    engine_s: float
    targets_ms: Mapping[str, float]
    clients: int = 0
    warmup: float = 0.2
    faults: Sequence[FaultAt] = ()
    tenants: bool = False
    open: bool = False
    first_by: str = "mean_ttft_ms"

    def warm(self, sessions: int) -> int:
        """How many of so many sessions, or requests of clients that wait, are the warm-up."""
        return int(sessions * self.warmup + 1e-9)

    def fingerprint(self, seed: int) -> str:
        """Of all that decides a run but the router: other requests or engines have another."""
        told = (self.ranks, self.slots, self.time_scale, *self.fleet, self.clients, self.warmup)
        digest = hashlib.sha256(
            repr((*told, self.faults, sorted(self.targets_ms.items()))).encode()
        )
        for session in self.sessions(seed):
            digest.update(repr(session).encode())
        return digest.hexdigest()[:16]


# --- text -----------------------------------------------------------------------------------------


@cache
def _bank() -> str:
    rng = random.Random("league")
    return "".join(f"{word} " for word in rng.choices(_WORDS, k=_BANK_WORDS + _LONGEST_PIECE))


def piece(key: int, tokens: int) -> str:
    """Text of so many tokens; texts of two keys differ in their first five words."""
    start = key * _SPREAD % _BANK_WORDS * CHARS_PER_TOKEN
    rest = _bank()[start : start + tokens * CHARS_PER_TOKEN]
    number, name = key * _HASH % (1 << 32), ""
    for _ in range(_NAME_WORDS):
        number, digit = divmod(number, len(_WORDS))
        name += f"{_WORDS[digit]} "
    return (name + rest)[: tokens * CHARS_PER_TOKEN]


def text_of(request: TraceRequest) -> str:
    """A prompt of a trace's blocks; the same block is the same text."""
    text = "".join(piece(block, request.block_tokens) for block in request.blocks)
    return text[: request.prompt_tokens * CHARS_PER_TOKEN]


class _Keys:
    """Keys of texts that nothing else has."""

    def __init__(self, seed: int) -> None:
        self._next = _OWN_KEYS * (1 + seed)

    def new(self, tokens: int) -> str:
        self._next += 1
        return piece(self._next, tokens)


# --- single requests ------------------------------------------------------------------------------


def _lengths(trace: str, cap: int, rng: random.Random) -> Iterator[tuple[int, int]]:
    rows = load_trace(trace).requests
    while True:
        row = rng.choice(rows)
        yield row.prompt_tokens, min(row.output_tokens, cap)


def closed(requests: int, cap: int, seed: int, trace: str = "burstgpt") -> list[Session]:
    """A trace's lengths, without times."""
    rng, keys = random.Random(f"{seed} closed"), _Keys(seed)
    lengths = _lengths(trace, cap, rng)
    return [[Ask(keys.new(prompt), output)] for prompt, output in _first(lengths, requests)]


def poisson(rates: Mapping[str, float], until_s: float, cap: int, seed: int) -> list[Session]:
    """Azure's conversation lengths at each tenant's rate, until a time."""
    keys, asks = _Keys(seed), list[Ask]()
    for tenant, rate in rates.items():
        rng = random.Random(f"{seed} poisson {tenant}")
        lengths, at_s = _lengths("azure-conv", cap, rng), rng.expovariate(rate)
        while at_s < until_s:
            prompt, output = next(lengths)
            asks.append(Ask(keys.new(prompt), output, at_s, tenant))
            at_s += rng.expovariate(rate)
    return [[ask] for ask in sorted(asks, key=lambda ask: ask.wait_s)]


def _first(lengths: Iterator[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    return (next(lengths) for _ in range(count))


# --- sessions -------------------------------------------------------------------------------------

_MOST_TURNS, _LEAST_TURNS, _LONGEST_PROMPT = 5, 3, 12_000


@cache
def chains() -> tuple[tuple[TraceRequest, ...], ...]:
    """Mooncake's requests that share a beginning, in their order; long prompts left out."""
    owner: dict[int, list[TraceRequest]] = {}
    found: list[list[TraceRequest]] = []
    for request in load_trace("mooncake-synthetic").requests:
        # An id stands for the whole prompt up to its block's end, so the first one tells.
        if request.blocks[0] not in owner:
            owner[request.blocks[0]] = []
            found.append(owner[request.blocks[0]])
        owner[request.blocks[0]].append(request)
    turns = (chain[:_MOST_TURNS] for chain in found if len(chain) >= _LEAST_TURNS)
    return tuple(
        tuple(chain)
        for chain in turns
        if all(request.prompt_tokens <= _LONGEST_PROMPT for request in chain)
    )


def chat(sessions: int, until_s: float, seed: int) -> list[Session]:
    """Conversations that begin at any time until one; people think for a second, mean."""
    rng = random.Random(f"{seed} chat")
    drawn = rng.sample(chains(), sessions)
    starts = sorted(rng.uniform(0, until_s) for _ in drawn)
    return [
        [
            Ask(text_of(turn), turn.output_tokens, rng.expovariate(1.0) if number else start_s)
            for number, turn in enumerate(chain)
        ]
        for start_s, chain in zip(starts, drawn, strict=True)
    ]


_SYSTEM_TOKENS, _TASK_TOKENS, _OWN_TOKENS, _RESULT_TOKENS = 8_000, 1_500, 200, 400
_SIBLINGS, _CALLS = 16, 3


def agents(bursts: int, until_s: float, seed: int) -> list[Session]:
    """Bursts of siblings with one system prompt; each calls tools, whose results it reads."""
    rng, keys = random.Random(f"{seed} agents"), _Keys(seed)
    system, sessions = keys.new(_SYSTEM_TOKENS), list[Session]()
    for start_s in sorted(rng.uniform(0, until_s) for _ in range(bursts)):
        task = system + keys.new(_TASK_TOKENS)
        for _ in range(_SIBLINGS):
            prompt, wait_s, session = task + keys.new(_OWN_TOKENS), start_s, list[Ask]()
            for _ in range(_CALLS):
                session.append(Ask(prompt, rng.randint(20, 80), wait_s))
                prompt += keys.new(_RESULT_TOKENS)
                wait_s = rng.uniform(0.3, 1.0)
            sessions.append(session)
    return sessions


# --- the league's ---------------------------------------------------------------------------------


def _engines(batch_tokens: int) -> Sequence[str]:
    """That compute prompts, so many tokens a step."""
    step = ("--step-time", "5e-3,9.5e-8,0,5e-5", "--batch-tokens", f"{batch_tokens}")
    return *step, "--stream-interval", "16"


_PROMPTS = _engines(2048)
_CONVERSATION_MS = {"ttft": 1000.0, "tpot": 60.0}
_SESSION_MS = {"ttft": 1500.0, "tpot": 80.0}
CAP_TOKENS = 256
# Requests per engine second that 8 ranks serve at saturation under evenstep without prompt budgets,
# Azure's lengths with outputs cut at 256 tokens; ``python -m tests.bench.league.capacity`` finds
# them by simulation. With budgets they serve more.
CAPACITY = 56.5
SIMULATED = "under evenstep without prompt budgets, by simulation"
CAPACITY_ALONE = 95.9  # the same ranks without a barrier
_OPEN_S = 18.0


def _open(percent: int) -> Workload:
    return Workload(
        f"open-{percent}",
        f"single requests at {percent} % of what the ranks serve {SIMULATED}; prompts computed "
        "on them",
        partial(poisson, {"one": CAPACITY * percent / 100}, _OPEN_S, CAP_TOKENS),
        *(8, 64, 1.0, _PROMPTS, _OPEN_S + 12, _CONVERSATION_MS),
        open=True,
    )


def _chat(name: str, what: str, ranks: int, sessions: int, until_s: float) -> Workload:
    return Workload(
        name,
        what,
        partial(chat, sessions, until_s),
        *(ranks, 64, 1.0, (*_PROMPTS, "--kv-tokens", "200000"), until_s + 24, _SESSION_MS),
        warmup=1 / 3,
    )


_ALL = (
    Workload(
        "decode-saturated",
        "decode only, more clients than slots: every free slot is taken at once",
        partial(closed, 4500, 400),
        *(8, 32, 4.0, ("--step-time", "4.95e-3,9.5e-8", "--stream-interval", "16")),
        engine_s=9.0,
        targets_ms={"ttft": 500.0, "tpot": 12.0},
        clients=320,
        warmup=0.3,
        first_by="-tokens_per_s",
    ),
    *map(_open, (60, 80, 95, 110)),
    replace(
        _open(80),
        name="open-80-short-steps",
        what="as open-80, on engines set to 512 tokens a step instead of 2,048",
        fleet=_engines(512),
    ),
    # All conversations that the trace has, 40 in 3 s.
    _chat("chat", "conversations whose prompts begin alike, turn by turn", 8, 89, 6.7),
    _chat("chat-scale-1", "conversations as in chat, before fewer ranks", 2, 30, 9.0),
    Workload(
        "agents",
        "agents with one long system prompt, 16 at once, that call tools",
        partial(agents, 18, 18.0),
        *(8, 64, 1.0, (*_PROMPTS, "--kv-tokens", "200000"), 30.0, _SESSION_MS),
        warmup=4 / 18,  # whole bursts
    ),
    Workload(
        "unequal",
        "half of the workers at half speed, each on its own, at 80 % of what they serve "
        f"{SIMULATED}",
        partial(poisson, {"one": 0.8 * 6 / 8 * CAPACITY_ALONE}, _OPEN_S, CAP_TOKENS),
        *(8, 64, 1.0),
        (*_PROMPTS, "--no-barrier", "--speed", "1,1,1,1,.5,.5,.5,.5"),
        engine_s=_OPEN_S + 12,
        targets_ms=_CONVERSATION_MS,
        open=True,
    ),
    Workload(
        "faults",
        "one rank dies and comes back, another answers 500 at once, at the load of open-60",
        partial(poisson, {"one": 0.6 * CAPACITY}, _OPEN_S, CAP_TOKENS),
        *(8, 64, 1.0, _PROMPTS, _OPEN_S + 12, _CONVERSATION_MS),
        faults=(FaultAt(1, "kill", 6.0, 12.0), FaultAt(2, "error", 8.0, 14.0)),
        open=True,
        first_by="failed",
    ),
    Workload(
        "tenants",
        "a quiet tenant, whose figures these are, beside one that sends more than ranks can serve",
        partial(poisson, {"one": 5.0, "flood": 1.2 * CAPACITY}, 14.0, CAP_TOKENS),
        *(8, 24, 1.0, _PROMPTS, 40.0, _CONVERSATION_MS),
        tenants=True,
        open=True,
    ),
)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}
