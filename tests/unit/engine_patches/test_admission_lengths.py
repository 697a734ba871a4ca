"""What requests' outputs are taken to be."""

import pytest

from engine_patches.admission.ledger import Ledger, Ticket
from engine_patches.admission.lengths import PredictedLengths, SeenLengths


def ticket(id_: str = "a", hint: int | None = None, cap: int = 1000, prompt: int = 40) -> Ticket:
    return Ticket(id_, prompt, cap, hint)


def learned(outputs: list[int], share: float = 0.5, **others: float) -> PredictedLengths:
    """Has seen requests with these outputs, one after the other, again and again."""
    lengths = PredictedLengths(SeenLengths(), share=share, **others)  # type: ignore[arg-type]
    ledger = Ledger(lengths=lengths)
    for number in range(4096):
        id_ = str(number)
        ledger.arrived(ticket(id_))
        ledger.entered(id_)
        output = outputs[number % len(outputs)]
        ledger.running[id_].offset_tokens += output - 1
        ledger.stepped()
        ledger.left(id_)
    return lengths


def test_a_hint_counts_with_its_margin_and_below_the_cap() -> None:
    lengths = PredictedLengths(hints=True, margin=0.25)

    assert lengths.predict(ticket(hint=10), 0) == 13
    assert lengths.predict(ticket(hint=10, cap=12), 0) == 12
    assert lengths.predict(ticket(hint=10, cap=50), 13) == 50
    assert lengths.predict(ticket(cap=50), 0) == 50


def test_without_hints_the_cap_counts() -> None:
    assert PredictedLengths().predict(ticket(hint=10, cap=50), 0) == 50


@pytest.mark.parametrize(("share", "expected"), [(0.25, 10), (0.75, 100)])
def test_quantiles_are_those_of_the_lengths_seen(share: float, expected: int) -> None:
    assert learned([10, 100], share).predict(ticket(), 0) == expected


def test_a_request_that_goes_on_is_one_of_the_longer_ones() -> None:
    lengths = learned([10, 100, 300])

    assert [lengths.predict(ticket(), age) for age in (0, 10, 99)] == [100, 100, 100]
    assert lengths.predict(ticket(), 150) == 300
    assert lengths.predict(ticket(), 100) in (300, 301)
    assert lengths.predict(ticket(cap=200), 150) == 200
    assert lengths.predict(ticket(cap=20_000), 15_000) > 15_000


def test_a_surpassed_hint_gives_way_to_the_lengths_seen() -> None:
    lengths = learned([10, 300], hints=True, margin=0.5)

    assert lengths.predict(ticket(hint=20), 0) == 30
    assert lengths.predict(ticket(hint=20), 30) == 450


def test_those_that_still_run_count_as_longer_than_they_are() -> None:
    alone, beside = SeenLengths(), SeenLengths()
    runs = {str(number): ticket(str(number)) for number in range(50)}
    for one in runs.values():
        one.offset_tokens = one.prompt_tokens + 500 - 256
    for seen, running in ((alone, {}), (beside, runs)):
        for _ in range(200):
            one = ticket()
            one.generated_tokens = 10
            seen.ended(one, by_itself=True)
        for step in range(1, 257):
            seen.stepped(running, step)

    assert alone.quantile(0.9, 40, 0) < 20
    assert beside.quantile(0.9, 40, 0) > 500


def test_ends_at_the_cap_and_withdrawals_are_no_ends() -> None:
    seen = {by_itself: SeenLengths() for by_itself in (True, False)}
    for by_itself, curves in seen.items():
        for number in range(600):
            one = ticket(cap=1000 if number % 2 else 10)
            one.generated_tokens = 10 if number % 2 == 0 else 200
            curves.ended(one, by_itself=by_itself)
        for step in range(1, 257):
            curves.stepped({}, step)

    assert seen[True].quantile(0.5, 40, 0) == 200
    assert seen[False].quantile(0.5, 40, 0) > 200


def test_prompts_are_told_apart_by_their_size() -> None:
    seen = SeenLengths()
    for _ in range(600):
        for prompt, output in ((20, 5), (500, 80)):
            one = ticket(prompt=prompt)
            one.generated_tokens = output
            seen.ended(one, by_itself=True)
    for step in range(1, 257):
        seen.stepped({}, step)

    assert [seen.quantile(0.5, prompt, 0) for prompt in (20, 500)] == [5, 80]


def test_kinds_are_segments_of_the_predicted_length() -> None:
    lengths = PredictedLengths(hints=True, segments=(10, 20))
    ledger = Ledger(lengths=lengths)
    for hint in (1, 10, 11, 20, 21):
        ledger.arrived(ticket(str(hint), hint=hint))

    assert [one.kind for one in ledger.waiting] == [0, 0, 1, 1, 2]
    assert PredictedLengths().kind(Ticket("a", 1, 1, kind=5)) == 5


def test_where_hints_and_caps_count_alone_nothing_is_learned() -> None:
    lengths = PredictedLengths(hints=True)
    ledger = Ledger(lengths=lengths)
    for number in range(300):
        ledger.arrived(ticket(str(number), hint=3))
        ledger.entered(str(number))
        ledger.stepped()
        ledger.left(str(number))

    assert lengths.predict(ticket(cap=50), 0) == 50
