"""Costs and counts in sentences of the pages are those of the runs that are kept."""

import json
from statistics import median
from typing import Any

from tests.support.docs import ROOT, text_of, words


def kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "tests/data" / name).read_text())
    return found


def load_of(found: dict[str, Any]) -> str:
    """The machine's load meanwhile, the mean of its beginning and its end."""
    load = found["origin"]["load"]
    return f"{(load['start'][0] + load['end'][0]) / 2:.0f}"


def said(page: str) -> str:
    return words(text_of(f"docs/{page}"))


def test_a_black_hole() -> None:
    found = kept("reliability/black_hole.json")
    ways = found["ways"]
    bare, retries, both = (
        ways[name] for name in ("no retries, no breaker", "retries, no breaker", "as it is")
    )
    assert both["failed"] == 0
    assert (
        f"Of {found['requests']} requests {bare['failed']} fail without retries and breaker, and "
        f"{retries['failed']} with retries alone. With both none fails, and {both['asked_anew']} "
        "are sent twice"
    ) in said("reliability.md")


def test_a_recording() -> None:
    found = kept("costs/recording.json")
    step, request = found["a step"], found["a request"]
    assert (
        f"{step['us']:.0f} µs of CPU and {step['bytes'] / 1000:.1f} kB for a step of "
        f"{found['workers']} workers, {request['us']:.0f} µs and "
        f"{request['bytes'] / 1000:.1f} kB for a request"
    ) in said("observe-and-diagnose.md")


def test_a_line_of_the_log() -> None:
    us = kept("costs/request_log.json")["us_per_request"]
    less = us["warning, text"]
    more = sorted(us[f"info, {form}"] - less for form in ("text", "json"))
    assert f"A line takes {more[0]:.0f} to {more[1]:.0f} us of CPU" in said("deploy.md")


def test_a_scrape() -> None:
    found = kept("costs/scrape.json")
    assert (
        f"A scrape at {found['workers']} workers takes {found['cpu_ms']:.0f} ms of CPU, but blocks "
        f"other work for only {found['turn_ms']:.1f} ms at a time (medians of "
        f"{found['scrapes']}, at a load average of {load_of(found)} on two cores"
    ) in said("plugin.md")


def test_what_admission_decides() -> None:
    found = kept("costs/admission.json")
    us = {name: f"{row['mean_us']:.0f}" for name, row in found.items() if name != "origin"}
    text = said("admission.md")
    assert (
        f"takes {us['headroom']} us of CPU with `headroom`, {us['wait']} with `wait`, and "
        f"{us['nested_wait']} with `nested_wait`. `memory_checked` takes {us['memory_checked']} "
        f"with given lengths, and {us['memory_checked, lengths seen']} where it uses lengths seen "
        f"without a margin"
    ) in text
    assert f"at a load average of {load_of(found)} on two cores" in text


def test_gbp_cr_beside_the_best() -> None:
    found = kept("chains/gbp_cr.json")
    alike, unlike = found["equal"], found["unequal"]
    assert alike["optimal"] == alike["fleets"]
    rest = unlike["fleets"] - unlike["called_too_slow"]
    text = said("chains.md")
    assert f"for each of {alike['fleets']} small fleets with equal memory" in text
    assert f"it has for {unlike['optimal']} of {unlike['fleets']}" in text
    assert f"It calls {unlike['called_too_slow']} too slow" in text
    assert f"With the other {rest} it has {100 * (unlike['mean_ratio'] - 1):.1f} % more" in text
    assert unlike["worst_ratio"] == 2


def test_how_long_the_planner_searches() -> None:
    found = kept("chains/planning.json")
    mixed, unlike = (found["cpu_s"][name] for name in ("six types of GPU", "all different"))
    assert (
        f"A mixed fleet of six types of GPU takes {min(mixed):.2f} to {max(mixed):.1f} s of one "
        f"core. A fleet without two equal GPUs takes up to {max(unlike[:-1]):.1f} s, or "
        f"{unlike[-1]:.0f} s where the rate is more than it can serve ({found['servers']:,} "
        f"servers, {found['blocks']} blocks"
    ) in said("chains.md")
    assert found["loads"][-2] < 1 < found["loads"][-1]


def test_the_checks_of_a_request() -> None:
    pairs = kept("costs/http_front.json")["more_us_per_request"]
    assert (
        f"checks take {median(pairs):.0f} µs of CPU a request more than uvicorn's own class "
        f"({pairs[0]:.0f} to {pairs[-1]:.0f} in the pairs"
    ) in said("http-api.md")
