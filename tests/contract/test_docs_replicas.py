"""The figures of docs/replicas.md are the kept ones."""

import json
from pathlib import Path

from tests.support.docs import text_of

ROOT = Path(__file__).resolve().parents[2]


def test_sentences_have_the_kept_figures() -> None:
    kept = json.loads((ROOT / "tests/data/replicas/takeovers.json").read_text())
    page = " ".join(text_of("docs/replicas.md").split())
    file, lease = kept["file"], kept["lease"]
    soon, late = file["kill_to_first_dispatch_s"], lease["kill_to_first_dispatch_s"]
    assert f"{soon[0]:.2f} to {soon[-1]:.2f} s with a file" in page
    assert f"{late[0]:.2f} to {late[-1]:.2f} s with a Lease of 5 s" in page
    both = (file, lease)
    requests = sum(each["requests_that_reached_engines"] for each in both)
    twice = sum(each["slots_booked_twice"] for each in both)
    assert f"Slots booked twice: {twice} of {requests:,} requests" in page
    broken = sum(each["answers_lost_of_killed_replicas"] for each in both)
    assert f"Broken answers: {broken}, all of them while a replica was killed" in page
    assert [each["answers_lost_of_others"] + each["answers_refused"] for each in both] == [0, 0]
    steps = file["steps_to_even"] + lease["steps_to_even"]
    assert f"at once in {steps.count(0)} rounds of {len(steps)}" in page
