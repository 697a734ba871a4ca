from router.core.tenure import Candidate, Record, Tenure


def test_a_tenure_ends_before_its_lease() -> None:
    tenure = Tenure(lease_s=10.0)
    assert not tenure.holds(0.0)
    assert not tenure.renew(asked_s=100.0, now_s=101.0)
    assert tenure.holds(107.9)
    assert not tenure.holds(108.0)


def test_it_counts_from_the_request_and_is_unbroken_while_it_holds() -> None:
    tenure = Tenure(lease_s=10.0)
    tenure.renew(asked_s=0.0, now_s=0.0)
    assert tenure.renew(asked_s=7.0, now_s=7.9)
    assert tenure.holds(14.9)
    assert not tenure.renew(asked_s=14.0, now_s=15.0)
    tenure.end()
    assert not tenure.holds(15.0)


def test_a_candidate_takes_what_is_free_or_its_own() -> None:
    candidate = Candidate()
    assert candidate.may_write(Record("1", "", 5.0), "a", 0.0)
    assert candidate.may_write(Record("2", "a", 5.0), "a", 0.0)
    assert not candidate.may_write(Record("0", None, 5.0), "a", 0.0)
    assert not candidate.may_write(Record("3", "b", 5.0), "a", 0.0)


def test_a_lease_runs_from_the_first_sight_of_each_version() -> None:
    candidate = Candidate()
    assert not candidate.may_write(Record("1", "b", 5.0), "a", 100.0)
    assert not candidate.may_write(Record("2", "b", 5.0), "a", 104.0)
    assert not candidate.may_write(Record("2", "b", 5.0), "a", 108.9)
    assert candidate.may_write(Record("2", "b", 5.0), "a", 109.0)
