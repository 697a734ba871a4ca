from hypothesis import given
from hypothesis import strategies as st

from loadgen.emulator.text import (
    WORDS,
    drawn_output_tokens,
    estimate_text_tokens,
    plan_output,
    prompt_key,
)

keys = st.integers(0, 2**32 - 1)
tokens = st.integers(1, 200)
stops = st.lists(
    st.sampled_from([*WORDS[:6], "ever", "it at", "e", "nowhere", "once and none"]), max_size=3
)


@given(keys, tokens, tokens, stops, st.booleans())
def test_the_first_of_end_cap_and_stop_string_ends_it(
    key: int, hidden: int, cap: int, stop: list[str], ignore_eos: bool
) -> None:
    plan = plan_output(key, hidden, cap, stop, ignore_eos=ignore_eos)
    limit = cap if ignore_eos else min(hidden, cap)
    text = plan.text(0, plan.output_tokens)
    assert plan.output_tokens <= limit
    if plan.stop_reason is None:
        assert plan.output_tokens == limit
        assert plan.finish_reason == ("stop" if hidden <= cap and not ignore_eos else "length")
        assert not any(word in text for word in stop)
    else:
        assert plan.finish_reason == "stop"
        assert plan.stop_reason in stop
        assert text[plan.end_chars :].startswith(plan.stop_reason)
        before = plan.text(0, plan.output_tokens - 1)
        assert not any(word in before for word in stop)
        assert not any(word in text[: plan.end_chars] for word in stop)


@given(keys, st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_text_is_the_same_however_it_is_cut(key: int, a: int, b: int, c: int) -> None:
    first, middle, last = sorted((a, b, c))
    plan = plan_output(key, 300, 300, (), ignore_eos=False)
    assert plan.text(first, middle) + plan.text(middle, last) == plan.text(first, last)


@given(keys)
def test_a_drawn_length_is_a_function_of_the_key(key: int) -> None:
    assert drawn_output_tokens(key) == drawn_output_tokens(key) >= 1


@given(st.integers(), st.lists(st.integers(0, 9), min_size=1), st.integers(0, 3))
def test_a_key_is_a_function_of_seed_prompt_and_choice(
    seed: int, prompt: list[int], index: int
) -> None:
    assert prompt_key(seed, prompt, index) == prompt_key(seed, list(prompt), index)
    assert prompt_key(seed, prompt, index) != prompt_key(seed, prompt, index + 1)
    assert prompt_key(seed, prompt, index) != prompt_key(seed, [*prompt, 1], index)


@given(st.text())
def test_the_estimate_grows_with_the_text(text: str) -> None:
    assert 1 <= estimate_text_tokens(text) <= estimate_text_tokens(text + "four")
