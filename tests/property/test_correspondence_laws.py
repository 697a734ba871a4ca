"""What is foretold of text prompts comes from what engines told, whatever they told."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.prefix.correspondence import Correspondence
from router.core.prefix.ids import chain
from router.core.prefix.ids import seed as id_seed
from router.core.prefix.text_chunks import seed, text_content

SALTS = "", "one", "other"
parts = st.lists(st.sampled_from([b"a", b"b" * 700, b"c" * 90, b"d" * 512]), min_size=1, max_size=5)
tokens = st.lists(st.integers(0, 2), max_size=120)
# Salt, parts, tokens of the prompt and of the answer, whether the router's end comes first.
talks = st.lists(
    st.tuples(st.sampled_from(SALTS), parts, tokens, tokens, st.booleans()), max_size=12
)


@given(talks, st.sampled_from([2_000, 4_000, 1 << 20]))
def test_only_blocks_that_were_told_of_this_salt_are_foretold(
    said: list[tuple[str, list[bytes], list[int], list[int], bool]], most_bytes: int
) -> None:
    learned = Correspondence(16, most_bytes)
    told: dict[str, set[bytes]] = {salt: set() for salt in SALTS}
    for number, (salt, text, prompt, answer, early) in enumerate(said):
        content = text_content(seed({"salt": salt.encode()}), text)
        whole = chain(prompt + answer, id_seed(salt=salt))
        first, token = len(prompt) // 16, f"es-{number}"
        foretold = learned.predict(content)
        assert {foretold[at : at + 8] for at in range(0, len(foretold), 8)} <= told[salt]
        learned.sent(token, content)
        learned.told(token, 0, whole[: 8 * first])
        assert learned.memory_bytes <= most_bytes
        if learned.memory_bytes:
            assert learned.predict(content) == whole[: 8 * first], "equal content, equal blocks"
        if early:
            learned.ended(token)
        learned.told(token, first, whole[8 * first :])
        learned.ended(token)
        assert 0 <= learned.memory_bytes <= most_bytes
        told[salt].update(whole[at : at + 8] for at in range(0, len(whole), 8))
