"""Who is let in, policy by policy."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from engine_patches.admission import make_admission, read_admission
from engine_patches.admission.ledger import Ledger, Memory, Ticket
from engine_patches.admission.policies.headroom import WINDOW_ENTRIES, Reserve
from engine_patches.admission.policies.wait import RATE_MEMORY_S, MeanStepTime, Rates
from engine_patches.admission.protocol import Admission, Verdict, ledger_of
from engine_patches.admission.theory.completions import Completions
from tests.support.admission import STEP_S, Job, Small, end_step, memory_of


def made(**settings: object) -> tuple[Admission, Ledger]:
    policy = make_admission(read_admission(settings))
    return policy, ledger_of(policy)


def wait_for(ledger: Ledger, prompts: Sequence[int], **others: Any) -> None:
    for prompt in prompts:
        number = sum(ledger.arrivals.values())
        ledger.arrived(Ticket(f"w{number}", prompt, 100, **others))


def run(ledger: Ledger, prompt: int, output: int = 100) -> None:
    number = sum(ledger.arrivals.values())
    ledger.arrived(Ticket(f"r{number}", prompt, 1000, output, priority=-1))
    ledger.entered(f"r{number}")


def sizes(verdict: Verdict) -> list[int]:
    assert verdict.admit is not None
    return [ticket.entry_tokens for ticket in verdict.admit]


def memory(used: int, slots: int = 8, block: int = 1) -> Memory:
    return memory_of(100, used, slots, block)


def test_off_leaves_all_to_the_engine() -> None:
    policy, ledger = made(policy="off")
    wait_for(ledger, [5])

    assert policy.admit(ledger, memory(40), 0.0) == Verdict(None)
    assert policy.admissible_blocks(ledger, memory(40)) == 60


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "headroom", "headroom": 0.2},
        {"policy": "alpha_beta", "alpha": 0.2},
        {"policy": "wait", "headroom": 0.2, "thresholds": [9]},
    ],
)
def test_below_the_headroom_requests_enter_in_their_order(settings: Mapping[str, object]) -> None:
    policy, ledger = made(**settings)
    run(ledger, 40)
    wait_for(ledger, [15, 20, 6, 1])

    assert sizes(policy.admit(ledger, memory(40), 0.0)) == [15, 20]
    assert sizes(policy.admit(ledger, memory(39), 0.0)) == [15, 20, 6]
    assert sizes(policy.admit(ledger, memory(39, slots=1), 0.0)) == [15]
    assert sizes(policy.admit(ledger, memory(40, block=10), 0.0)) == [15, 20]
    assert sizes(policy.admit(ledger, memory(80), 0.0)) == []
    assert policy.admissible_blocks(ledger, memory(40, block=16)) == 1


@pytest.mark.parametrize("policy_name", ["headroom", "wait", "memory_checked"])
def test_an_empty_engine_takes_whom_the_headroom_would_keep_out(policy_name: str) -> None:
    share = {"margin": 0.3} if policy_name == "memory_checked" else {"headroom": 0.3}
    share |= {"headroom_max": 0.4} if policy_name != "memory_checked" else {}
    policy, ledger = made(policy=policy_name, **share)
    wait_for(ledger, [90, 5])

    assert sizes(policy.admit(ledger, memory(0), 0.0)) == [90]
    assert sizes(policy.admit(ledger, memory(0, slots=0), 0.0)) == []
    assert sizes(policy.admit(ledger, memory(20), 0.0)) == []
    assert policy.admissible_blocks(ledger, memory(0)) == 100


def test_the_headroom_follows_the_preemptions() -> None:
    reserve, ledger = Reserve(0.05, 0.07), Ledger()
    shares = []
    for lost in (3, 3, 3, 2, 1, 0, 0, 0, 0, 0):
        for number in range(WINDOW_ENTRIES - lost):
            ledger.arrived(Ticket(f"{number}", 1, 1))
            ledger.entered(f"{number}")
            if number < lost:
                ledger.preempted(f"{number}")
                ledger.entered(f"{number}")
            ledger.left(f"{number}")
        reserve.limit_blocks(ledger, memory(0))
        shares.append(round(reserve.share, 3))

    assert shares == [0.06, 0.07, 0.07, 0.07, 0.07, 0.065, 0.06, 0.055, 0.05, 0.05]
    assert reserve.limit_blocks(ledger, memory(0)) == 95


def test_no_more_of_a_type_enter_than_its_threshold() -> None:
    policy, ledger = made(policy="wait", thresholds=[2, 1])
    wait_for(ledger, [1, 2, 3], kind=0)
    wait_for(ledger, [4, 5], kind=1)
    wait_for(ledger, [6, 7], kind=2)

    assert sizes(policy.admit(ledger, memory(0), 0.0)) == [1, 2, 4, 6]


def test_example_2_of_the_paper_with_a_cap() -> None:
    """C = 12, prompts of 1 and outputs of 2 tokens, 4 arrivals a step: then 4 end in each."""
    jobs = [Job(1, 2, step=step) for step in range(100) for _ in range(4)]
    jobs += [Job(1, 2) for _ in range(6)]
    variants: dict[str, dict[str, object]] = {
        "cap": {"policy": "wait", "thresholds": [4], "headroom": 0.0},
        "none": {"policy": "off"},
    }
    engines = {}
    for name, settings in variants.items():
        engines[name] = Small(make_admission(read_admission(settings)), 12, slots=100)
        engines[name].run(jobs)

    assert engines["cap"].preempted == []
    assert len(jobs) / (max(engines["cap"].ended.values()) / STEP_S) > 3.9
    assert engines["none"].preempted != []


def test_a_type_is_held_until_enough_wait_or_for_so_long() -> None:
    policy, ledger = made(policy="wait", thresholds=[2, 3], hold_s=0.5)
    ledger.arrived(Ticket("a", 1, 9, kind=0, arrived_s=10.0))
    ledger.arrived(Ticket("b", 2, 9, kind=1, arrived_s=10.25))

    assert policy.admit(ledger, memory(0), 10.3) == Verdict([], wake_s=10.5)
    verdict = policy.admit(ledger, memory(0), 10.5)
    assert sizes(verdict) == [1]
    assert verdict.wake_s == 10.75

    ledger.arrived(Ticket("c", 3, 9, kind=0, arrived_s=10.4))
    assert sizes(policy.admit(ledger, memory(0), 10.4)) == [1, 3]


def test_thresholds_are_a_steps_arrivals() -> None:
    """25 arrivals of one type a second, 2 of the other, steps of 0.1 s."""
    policy, ledger = made(policy="wait")
    wait_for(ledger, [1, 1, 1])
    assert sizes(policy.admit(ledger, memory(0), 0.0)) == [1]
    run(ledger, 1)
    for step in range(1, 401):
        ledger.stepped()
        now_s = step / 10
        if step % 2 == 0:
            wait_for(ledger, [1] * 5, kind=0)
        if step % 5 == 0:
            wait_for(ledger, [2], kind=1)
        verdict = policy.admit(ledger, memory(0), now_s)

    assert sizes(verdict) == [1, 1, 1, 2]


def test_what_has_piled_up_drains_as_fast_as_requests_end() -> None:
    policy, ledger = made(policy="wait")
    run(ledger, 1)
    wait_for(ledger, [1] * 1000)
    for step in range(600):
        verdict = policy.admit(ledger, memory(0), step / 10)
        for id_ in ("x", "y"):
            ledger.arrived(Ticket(f"{id_}{step}", 5, 9, priority=-1, kind=0))
            ledger.arrivals[0] -= 1
            ledger.entered(f"{id_}{step}")
            ledger.left(f"{id_}{step}")
        ledger.stepped()

    assert sizes(verdict) == [1, 1, 1]


def test_rates_are_those_of_late() -> None:
    rates = Rates()
    for step in range(1001):
        rates.see({0: 3 * step}, step / 10)
    assert rates.per_s([0]) == pytest.approx(30, rel=0.02)
    assert rates.per_s([1]) == 0

    for step in range(1001, 1001 + int(10 * RATE_MEMORY_S)):
        rates.see({0: 3000, 1: step - 1000}, step / 10)
    assert rates.per_s([0]) == pytest.approx(30 / 2.718, rel=0.02)
    assert rates.per_s([1]) == pytest.approx(10 * (1 - 1 / 2.718), rel=0.02)


def test_a_step_is_timed_only_while_somebody_runs() -> None:
    time, ledger = MeanStepTime(), Ledger()
    time.see(ledger, 0.0)
    run(ledger, 1)
    for now_s in (0.1, 0.2):
        ledger.stepped()
        time.see(ledger, now_s)
    assert time.mean_s == pytest.approx(0.1)

    ledger.left("r0")
    ledger.stepped()
    time.see(ledger, 50.0)
    run(ledger, 1)
    time.see(ledger, 60.0)
    ledger.stepped()
    ledger.stepped()
    time.see(ledger, 60.4)
    assert time.mean_s == pytest.approx(0.15)


def test_the_shortest_enter_first_while_the_memory_suffices_to_the_end() -> None:
    policy, ledger = made(policy="memory_checked")
    run(ledger, 40, output=10)
    for id_, prompt, hint in (("long", 15, 60), ("short", 20, 3), ("middle", 20, 20)):
        ledger.arrived(Ticket(id_, prompt, 100, hint))

    admit = policy.admit(ledger, memory(40), 0.0).admit

    # When the running one ends it holds 49 tokens and middle 29; long would hold 24.
    assert admit is not None
    assert [ticket.id for ticket in admit] == ["short", "middle"]
    for ticket in admit:
        ledger.entered(ticket.id)
    # When short ends they hold 42, 22 and 22.
    assert policy.admissible_blocks(ledger, memory(40)) == 14


def test_who_is_withdrawn_before_it_enters_takes_no_memory() -> None:
    policy, ledger = made(policy="memory_checked")
    run(ledger, 40, output=10)
    ledger.arrived(Ticket("a", 20, 100, 10))
    assert sizes(policy.admit(ledger, memory(40), 0.0)) == [20]
    ledger.left("a", by_itself=False)

    assert policy.admissible_blocks(ledger, memory(40)) == 100 - 49


@pytest.mark.parametrize(("margin", "expected"), [(0.2, [20]), (0.25, [])])
def test_a_margin_stays_free_at_every_end(margin: float, expected: list[int]) -> None:
    policy, ledger = made(policy="memory_checked", margin=margin)
    run(ledger, 40, output=10)
    ledger.arrived(Ticket("a", 20, 100, 11))

    # 49 and 29 tokens at the running one's end.
    assert sizes(policy.admit(ledger, memory(40), 0.0)) == expected


def test_memory_that_requests_share_is_not_counted_on() -> None:
    policy, ledger = made(policy="memory_checked")
    run(ledger, 40, output=10)
    ledger.arrived(Ticket("a", 43, 100, 11))

    assert sizes(policy.admit(ledger, memory(30), 0.0)) == []


def test_what_others_hold_counts_against_the_memory() -> None:
    policy, ledger = made(policy="memory_checked", ageing=0.0)
    run(ledger, 40, output=10)
    ledger.arrived(Ticket("a", 20, 100, 11))

    # 49 and 29 tokens at the running one's end; 20 of the memory are not its.
    assert sizes(policy.admit(ledger, memory(40 + 22), 0.0)) == [20]
    assert sizes(policy.admit(ledger, memory(40 + 23), 0.0)) == []
    assert policy.admissible_blocks(ledger, memory(40 + 23)) == 28


def test_a_request_that_surpasses_its_prediction_gets_another() -> None:
    policy, ledger = made(policy="memory_checked")
    run(ledger, 40, output=2)
    (one,) = ledger.running.values()
    for _ in range(5):
        ledger.stepped()
    policy.admit(ledger, memory(45), 0.0)
    assert one.predicted_tokens == 2

    wait_for(ledger, [1])
    policy.admit(ledger, memory(45), 0.0)

    assert one.predicted_tokens > 5
    assert end_step(one) >= 5


def test_a_prompt_that_takes_steps_ends_later_once_only() -> None:
    policy, ledger = made(policy="memory_checked")
    ledger.arrived(Ticket("a", 40, 100, 10))
    memory = Memory(100, 0, 8, step_tokens=20, prompt_tokens_left=20)
    verdict = policy.admit(ledger, memory, 0.0)
    assert sizes(verdict) == [40]
    ledger.entered("a")
    # Its last token comes in step 10, when it is computed as having 50: one more than it will.
    highest = []
    for still in (["a"], [], []):
        assert isinstance(policy.follower, Completions)
        highest.append(policy.follower.highest_blocks())
        ledger.stepped(still)

    assert highest == [50, 49, 49]
    assert end_step(ledger.running["a"]) == 10


def test_nobody_is_predicted_to_outgrow_the_memory() -> None:
    policy, ledger = made(policy="memory_checked")
    run(ledger, 40, output=10)
    ledger.arrived(Ticket("a", 20, 1000, 500))

    # 49 and 29 tokens at the running one's end; then it may have all 100.
    assert sizes(policy.admit(ledger, memory(40), 0.0)) == [20]


def test_who_holds_more_than_the_memory_that_is_known_counts_as_it_is() -> None:
    completions = Completions()
    completions.fit(memory(0))
    ledger = Ledger(follower=completions)
    ledger.arrived(Ticket("a", 120, 10))
    ledger.entered("a")

    assert completions.highest_blocks() == 120


def test_prompts_take_the_steps_that_running_requests_leave_them() -> None:
    policy, ledger = made(policy="memory_checked")
    for _ in range(8):
        run(ledger, 1)
    for id_, prompt in (("a", 30), ("b", 15), ("c", 4)):
        ledger.arrived(Ticket(id_, prompt, 1000, 10 + prompt))
    memory = Memory(10_000, 8, 8, step_tokens=20, prompt_tokens_left=12)

    policy.admit(ledger, memory, 0.0)

    # 12 tokens in this step; then 12 beside eight, 11 beside nine and 10 beside ten.
    assert [(t.entry_tokens, t.late_steps) for t in ledger.waiting] == [(4, 0), (15, 1), (30, 4)]


def test_a_prompt_takes_a_step_for_each_chunk_of_its_own() -> None:
    policy, ledger = made(policy="memory_checked")
    for id_, prompt in (("a", 4), ("b", 30), ("c", 31)):
        ledger.arrived(Ticket(id_, prompt, 1000, 10 + prompt))

    policy.admit(ledger, Memory(10_000, 0, 8, prompt_chunk=10), 0.0)

    assert [(t.entry_tokens, t.late_steps) for t in ledger.waiting] == [(4, 0), (30, 2), (31, 3)]


def test_many_running_requests_are_followed() -> None:
    completions = Completions()
    completions.fit(memory_of(100_000, 0, 500, 16))
    ledger = Ledger(follower=completions)
    for number in range(200):
        ledger.arrived(Ticket(f"{number}", 10, 1 + number))
        ledger.entered(f"{number}")
    for step in range(100):
        ledger.stepped()
        ledger.left(f"{step}")
    for number in range(200, 500):
        ledger.arrived(Ticket(f"{number}", 10, 50))
        ledger.entered(f"{number}")

    held = [
        sum(
            -(-(one.offset_tokens + end) // 16)
            for one in ledger.running.values()
            if end_step(one) >= end
        )
        for end in {end_step(one) for one in ledger.running.values()}
    ]
    assert completions.highest_blocks() == max(held)
