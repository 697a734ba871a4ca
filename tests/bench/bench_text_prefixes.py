"""How well the router foretells which blocks a text prompt becomes, without a tokenizer.

    ENGINE/bin/python tests/bench/bench_text_prefixes.py TOKENIZER [--conversations 200] [--turns 6]
        [--seed 1] [--escaped] [--json FILE]

TOKENIZER is the folder of a model with tokenizer.json and chat_template.jinja (`make engine` makes
the trained one), and the interpreter the engine's, which has `tokenizers` and `jinja2`.

Conversations with shared and with own system prompts, of prose, code and texts in other scripts,
take turns in random order before one engine with an endless cache. Answers are cut anywhere, as
`max_tokens` does, and repeated in the next turn as the client has read them. Before each request
the router foretells its blocks; the truth is its leading blocks that the engine holds by then. An
error counts in tokens, beside the tokens of one chunk of this prompt. --escaped: bodies with
\\uXXXX, as some clients write them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from loadgen.report.origin import Engines, origin
from router.core.prefix.correspondence import Correspondence
from router.core.prefix.ids import block_ids, chain, seed
from router.core.prefix.text_chunks import CHUNK_BYTES
from router.core.request_limits import DEFAULT_LIMITS
from router.dispatch.models import CachedModel
from router.proxy.body import parse
from tests.support.figure_files import write_figures

ROOT = Path(__file__).parents[2]
CODE = ("router/core/prefix", "router/proxy/content.py", "tests/bench/bench_text_prefixes.py")
SCRIPTS = (
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Маршрутизатор ждёт ответа.",
    "请把下面的句子翻译成英文。今天天气很好,我们一起去公园散步吧。服务器正在处理请求。",
    "いろはにほへと、ちりぬるを。この関数は配列を並べ替えて、結果を返します。",
    "اكتب رسالة قصيرة إلى صديقك. الطقس جميل اليوم والخادم يعمل بشكل جيد.",
    "नमस्ते, आप कैसे हैं? कृपया इस पाठ का सारांश लिखिए और उत्तर दीजिए।",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Ο διακομιστής απαντά αμέσως.",
)


class Texts:
    """Pieces of the repository's pages and sources, and of other scripts."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._prose = "\n".join(p.read_text() for p in sorted(ROOT.glob("docs/**/*.md")))
        self._code = "\n".join(p.read_text() for p in sorted(ROOT.glob("router/core/**/*.py")))

    def kind(self) -> str:
        return self._rng.choices(("prose", "code", "other"), (5, 3, 2))[0]

    def text(self, kind: str, characters: int) -> str:
        if kind == "other":
            words = self._rng.choice(SCRIPTS).split(" ")
            return " ".join(self._rng.choices(words, k=max(1, characters // 8)))
        source = self._code if kind == "code" else self._prose
        start = self._rng.randrange(len(source) - characters)
        return source[start : start + characters]


@dataclass(slots=True)
class Conversation:
    kind: str
    messages: list[dict[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class Seen:
    """One request: blocks foretold and held, and the tokens of a chunk."""

    turn: int
    foretold: int
    held: int
    chunk_tokens: float
    block_tokens: int

    @property
    def within(self) -> bool:
        return abs(self.foretold - self.held) * self.block_tokens <= self.chunk_tokens


class Engine:
    """Tokens of a chat, blocks of tokens, an endless cache."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        source = (folder / "chat_template.jinja").read_text()
        self._template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
            source
        )

    def tokens(self, messages: list[dict[str, str]]) -> list[int]:
        text = self._template.render(messages=messages, add_generation_prompt=True)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def answer(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def requests(
    engine: Engine, conversations: int, turns: int, rng: random.Random
) -> Iterator[tuple[int, list[dict[str, str]], list[int], list[int]]]:
    """Turn, messages, tokens of the prompt, tokens of the answer."""
    texts = Texts(rng)
    shared = [texts.text(texts.kind(), rng.randrange(300, 8000)) for _ in range(5)]
    talks = []
    for _ in range(conversations):
        talk = Conversation(texts.kind())
        roll = rng.random()
        if roll < 0.8:
            own = texts.text(texts.kind(), rng.randrange(200, 4000))
            said = rng.choice(shared) if roll < 0.6 else own
            talk.messages.append({"role": "system", "content": said})
        talks.append(talk)
    order = [number for number in range(conversations) for _ in range(turns)]
    rng.shuffle(order)
    turn_of = [0] * conversations
    for number in order:
        talk, turn_of[number] = talks[number], turn_of[number] + 1
        kind = talk.kind if rng.random() < 0.7 else texts.kind()
        asked = texts.text(kind, int(rng.lognormvariate(5.5, 1.0)) + 5)
        talk.messages.append({"role": "user", "content": asked})
        prompt = engine.tokens(talk.messages)
        answer = engine.answer(texts.text(kind, int(rng.lognormvariate(6.3, 0.9)) + 5))
        answer = answer[: rng.randrange(len(answer) // 2, len(answer)) + 1]
        yield turn_of[number], list(talk.messages), prompt, answer
        read = engine.tokenizer.decode(answer, skip_special_tokens=False)
        talk.messages.append({"role": "assistant", "content": read})


def measured(
    engine: Engine, block_tokens: int, options: argparse.Namespace
) -> tuple[list[Seen], Correspondence, list[float], list[float]]:
    router, held = Correspondence(block_tokens), set[bytes]()
    seen, predicting, learning = list[Seen](), list[float](), list[float]()
    rng = random.Random(options.seed)
    model = CachedModel("model", "")
    made = requests(engine, options.conversations, options.turns, rng)
    for number, (turn, messages, prompt, answer) in enumerate(made):
        body = json.dumps({"messages": messages}, ensure_ascii=options.escaped).encode()
        content = parse(body, DEFAULT_LIMITS, lambda _: model).content
        assert content is not None
        # The last token that the engine has drawn is computed by nobody.
        whole = block_ids(chain(prompt + answer[:-1], seed()), block_tokens)
        first = len(prompt) // block_tokens
        ids = [whole[at : at + 8] for at in range(0, len(whole), 8)]
        true = next((n for n, id_ in enumerate(ids[:first]) if id_ not in held), first)
        foretold = timed(partial(router.predict, content), predicting)
        count = next(
            (n for n in range(len(foretold) // 8) if foretold[8 * n : 8 * n + 8] not in held),
            len(foretold) // 8,
        )
        seen.append(
            Seen(turn, min(count, first), true, CHUNK_BYTES * len(prompt) / len(body), block_tokens)
        )
        router.sent(str(number), content)
        timed(partial(router.told, str(number), 0, whole[: 8 * first]), learning)
        router.told(str(number), first, whole[8 * first :])
        router.ended(str(number))
        held.update(ids)
    return seen, router, predicting, learning


def timed(call: Callable[[], Any], times: list[float]) -> Any:
    start = time.process_time()
    done = call()
    times.append(time.process_time() - start)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--escaped", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    header = origin(Engines.SIMULATED, CODE, tokenizers=version("tokenizers"))
    engine = Engine(options.tokenizer)
    rows = [of_blocks(engine, block_tokens, options) for block_tokens in (16, 32)]
    if options.json:
        conditions = {"conversations": options.conversations, "turns": options.turns}
        write_figures(options.json, {**conditions, "blocks": rows}, header)


def of_blocks(engine: Engine, block_tokens: int, options: argparse.Namespace) -> dict[str, object]:
    """One size of blocks, printed too."""
    seen, router, predicting, learning = measured(engine, block_tokens, options)
    found: dict[str, object] = {"block_tokens": block_tokens, "requests": len(seen)}
    for name, some in (
        ("all", seen),
        ("first_turns", [one for one in seen if one.turn == 1]),
        ("later_turns", [one for one in seen if one.turn > 1]),
    ):
        found[name] = {
            "exact": statistics.mean(one.foretold == one.held for one in some),
            "within_a_chunk": statistics.mean(one.within for one in some),
            "foretold_of_held": sum(one.foretold for one in some) / sum(one.held for one in some),
        }
    found["predict_us"] = 1e6 * statistics.median(predicting)
    found["learn_us"] = 1e6 * statistics.median(learning)
    found["memory_bytes"] = router.memory_bytes
    print(json.dumps(found, indent=1), flush=True)
    return found


if __name__ == "__main__":
    main()
