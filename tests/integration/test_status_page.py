"""The status page in a headless Chromium, before a live router and an emulated fleet."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from loadgen.demo.run import EMULATED_POWER
from tests.support.browser import Page
from tests.support.chromium import press, program, tab
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.replays import replay_command, replaying
from tests.support.server import Server, free_port, running, running_router, starting, wait_until

WORKERS = 3
FLEET = (
    *("--workers", f"{WORKERS}", "--slots", "4", "--step-time", "1e-2,1e-6"),
    *("--prefill-workers", "1", "--prefill-step-time", "1e-3,1e-6"),
)
TRAFFIC = ("--arrivals", "closed:20", "--max-tokens", "40")
CARDS = ("idle", "imbalance", "tokens", "pool", "ttft", "power")
# What a card shows, None while that is not known.
SHOWN = (
    "Object.fromEntries([...document.querySelectorAll('#cards .card')].map(c => [c.id.slice(5), \
c.classList.contains('is-unknown') ? null : c.querySelector('.value').textContent]))"
)
# Whether every plot has a line: the axes are grey, the lines are not.
DRAWN = """
[...document.querySelectorAll('canvas')].every(canvas => {
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < pixels.length; i += 4) {
    const [red, green, blue, alpha] = pixels.slice(i, i + 4);
    if (alpha > 200 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) return true;
  }
  return false;
})
"""
HEARD = "document.getElementById('status').dataset.state"
BACKGROUND = "getComputedStyle(document.querySelector('.card')).backgroundColor"
FOCUS = "(e => e.id || e.name || e.className || e.tagName)(document.activeElement)"


@dataclass(frozen=True, slots=True)
class Live:
    """A router with traffic, and its page's address."""

    fleet: Fleet
    router: Server
    admin_port: int
    folder: Path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}/"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    program()
    folder, port = tmp_path_factory.mktemp("page"), free_port()
    admin = ("--admin-port", f"{port}", "--policy", "round_robin")
    with (
        running_fleet(folder, *FLEET) as fleet,
        running_router(folder, *EMULATED_POWER, *admin, *worker_flags(fleet)) as router,
        replaying(router.url, folder, *TRAFFIC),
    ):
        yield Live(fleet, router, port, folder)


@pytest.fixture(scope="module")
def page(live: Live) -> Iterator[Page]:
    for page in tab():
        page.call("Runtime.enable")
        page.call("Log.enable")
        page.open(live.address)
        page.wait_for(f"{HEARD} === 'live'")
        yield page


def rows(page: Page) -> list[list[str]]:
    """Texts of the workers' table."""
    told = page.evaluate(
        "JSON.stringify([...document.querySelectorAll('#workers tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent)))"
    )
    found: list[list[str]] = json.loads(told)
    return found


def test_every_panel_has_data(page: Page) -> None:
    page.wait_for(f"Object.values({SHOWN}).every(Boolean)")
    page.wait_for(DRAWN)

    shown = page.evaluate(SHOWN)
    assert tuple(shown) == CARDS
    assert all(re.search(r"\d", value) for value in shown.values()), shown
    assert "useful" in page.evaluate("document.querySelector('#card-power .note').textContent")
    assert page.evaluate("document.querySelector('#policy b').textContent") == "round_robin"
    assert page.evaluate("document.querySelectorAll('#facts li').length") >= 6
    assert page.evaluate("document.getElementById('tags').textContent").startswith("emulated")
    assert [row[1] for row in rows(page)] == ["up"] * WORKERS
    assert [row[8] for row in rows(page)] == ["snapshots"] * WORKERS


def test_pointing_at_the_plots_says_what_is_there(page: Page) -> None:
    for host, words in (("loads", "fullest "), ("card-pool .plot", "\\n")):
        # In the middle: the page's head covers what is scrolled to its top.
        page.evaluate(f"document.querySelector('#{host}').scrollIntoView({{block: 'center'}})")
        x, y = page.evaluate(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])"
            f"(document.querySelector('#{host} .u-over').getBoundingClientRect())"
        )
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        tip = f"document.querySelector('#{host} .tip')"
        page.wait_for(f"!{tip}.hidden && {tip}.textContent.includes('{words}')")


def test_each_group_can_be_chosen(page: Page) -> None:
    page.evaluate("location.hash = encodeURIComponent('default/prefill')")
    wait_until(lambda: len(rows(page)) == 1, 60, "its one worker is shown")

    assert "computes prompts for default" in page.evaluate(
        "document.getElementById('tags').innerText"
    )
    assert page.evaluate("document.querySelector('#policy b').textContent") == "least_prefill"
    page.evaluate(
        "(chooser => { chooser.value = 'default'; chooser.dispatchEvent(new Event('change')); })"
        "(document.getElementById('group'))"
    )
    wait_until(lambda: len(rows(page)) == WORKERS, 60, "the first group is shown")


# A past of three workers, and what pushes a state of theirs, with these sums and what is more.
MADE = """
(({ Past }) => {
  const sums = { steps: 0, imbalance_tokens: 0, timed_s: 0, measured_s: 0, waiting_s: 0,
    output_tokens: 0, completed: 0, first_tokens: 0, first_token_s: 0, useful_j: 0,
    waiting_j: 0, idle_j: 0, undivided_j: 0 };
  const workers = [10, 4, 99].map((load, i) =>
    ({ id: `${i}`, up: i < 2, load_tokens: load, power_w: null }));
  const group = { pool_requests: null, rule: null, sums, workers };
  const past = new Past(['0', '1', '2']);
  const push = (time, clock, sums, more) =>
    past.push(time, clock, { ...group, ...more, sums: { ...group.sums, ...sums } });
  return [past, push];
})
"""


def test_what_is_not_known_is_never_0(page: Page) -> None:
    figures = page.evaluate(f"""
        import('/web/history.js').then((module) => {{
          const [past, push] = {MADE}(module);
          push(100, 0);
          push(101, 1);
          push(111, 11);
          return [past.latest, past.loads, past.max];
        }})
    """)

    latest, loads, most = figures
    # Of two live workers, as the router counts them.
    assert latest["imbalance"] == 2 * 10 - 14
    unknown = ("idle", "tokens", "requests", "pool", "power", "ttft")
    assert [latest[name] for name in unknown] == [None] * len(unknown)
    # A line ends where its worker is down, and where nothing has been heard for a while.
    assert loads == [[10, 10, None, 10], [4, 4, None, 4], [None] * 4]
    assert most == [10, 10, None, 10]


def test_of_another_router_and_of_a_clock_set_back_nothing_is_reckoned(page: Page) -> None:
    again, anew, back = page.evaluate(f"""
        import('/web/history.js').then((module) => {{
          const [past, push] = {MADE}(module);
          const routed = {{ pool_requests: 0 }};
          push(100, 50, {{ completed: 7 }}, routed);
          push(101, 51, {{ completed: 9 }}, routed);
          push(101, 51, {{ completed: 9 }}, routed);
          const again = [past.times.length, past.latest.requests];
          push(103, 53, {{ completed: 1 }}, routed);
          const anew = [past.times, past.latest.requests, past.average.requests];
          push(50, 54, {{ completed: 2 }}, routed);
          push(51, 55, {{ completed: 4 }}, routed);
          return [again, anew, [past.times, past.loads[0], past.latest.requests]];
        }})
    """)

    # A state that is told again is no further one.
    assert again == [2, 2]
    assert anew == [[100, 101, 101.5, 103], None, None]
    assert back == [[50, 51], [10, 10], 2]


@pytest.mark.parametrize("width", [400, 1360])
def test_it_fits_its_window(page: Page, width: int) -> None:
    page.size(width, 900)

    page.wait_for(f"document.querySelector('#loads canvas').clientWidth < {width}")
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_tables_stand_beside_the_plots(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")

    page.wait_for(f"document.querySelectorAll('#loads-table tbody tr').length === {WORKERS}")
    page.wait_for("document.querySelectorAll('#card-tokens tbody tr').length > 1")
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = false)")
    labels = page.evaluate(
        "[...document.querySelectorAll('[role=img]')].map(each => each.ariaLabel).join('\\n')"
    )
    assert f"Load over time of {WORKERS} workers" in labels
    assert "Idle share over time, now" in labels


def test_themes_follow_the_system_until_one_is_chosen(page: Page) -> None:
    page.prefer(prefers_color_scheme="dark")
    page.wait_for(f"{BACKGROUND} === 'rgb(23, 30, 38)'")
    page.prefer(prefers_color_scheme="light")
    page.wait_for(f"{BACKGROUND} === 'rgb(255, 255, 255)'")

    page.evaluate("document.getElementById('theme').click()")
    assert page.evaluate(BACKGROUND) == "rgb(23, 30, 38)"
    page.prefer(prefers_color_scheme="dark")
    page.evaluate("document.getElementById('theme').click()")
    assert page.evaluate(BACKGROUND) == "rgb(255, 255, 255)"


def test_everything_is_reached_by_keyboard_and_seen(page: Page, live: Live) -> None:
    # Tab goes on from what was last scrolled to, too; a page just opened begins at its top.
    page.open(live.address)
    page.wait_for(f"Object.values({SHOWN}).every(Boolean)")
    reached: list[str] = []
    while (not reached or reached[-1] != "scroll workers") and len(reached) < 40:
        press(page, "Tab")
        assert (
            page.evaluate(
                "getComputedStyle(document.activeElement.type === 'radio' ? "
                "document.activeElement.nextSibling : document.activeElement)"
                ".outlineStyle"
            )
            != "none"
        )
        reached.append(page.evaluate(FOCUS))

    assert reached[:6] == ["skip", "group", "window", "pause", "theme", "SUMMARY"]
    assert reached.count("SUMMARY") == 1 + len(CARDS)


def test_pausing_by_keyboard(page: Page) -> None:
    page.evaluate("document.getElementById('pause').focus()")
    press(page, " ", "Space", text=" ")
    page.wait_for(f"{HEARD} === 'paused'")
    press(page, " ", "Space", text=" ")
    page.wait_for(f"{HEARD} === 'live'")


def test_a_worker_that_dies_is_shown_with_the_reason(page: Page, live: Live) -> None:
    live.fleet.fault(1, "kill")
    wait_until(lambda: rows(page)[1][1].startswith("down: "), 60, "the page shows it")

    assert "onnect" in rows(page)[1][1]
    assert rows(page)[1][2] == "–"
    assert "1 worker down" in page.evaluate("document.getElementById('facts').textContent")
    live.fleet.restore(1)
    wait_until(lambda: rows(page)[1][1] == "up", 60, "the page shows that it is back")


def test_workers_that_come_and_go_have_their_pasts(page: Page) -> None:
    ids, loads, times = page.evaluate("""
        import('/web/history.js').then((module) => {
          const past = new module.Past(['a', 'b']);
          past.times = [1, 2];
          past.loads = [[5, 6], [7, 8]];
          past.follow(['b', 'c']);
          return [past.ids, past.loads, past.times];
        })
    """)

    assert (ids, loads, times) == (["b", "c"], [[7, 8], [None, None]], [1, 2])


def test_the_page_follows_workers_that_are_drained_removed_and_added(
    page: Page, live: Live
) -> None:
    admin, worker = f"{live.address}workers", quote(rows(page)[2][0], safe="")
    assert httpx.post(f"{admin}/{worker}/drain", timeout=60).is_success
    wait_until(lambda: rows(page)[2][1] == "draining", 60, "the page shows it")
    assert "1 worker draining" in page.evaluate("document.getElementById('facts').textContent")
    assert httpx.delete(f"{admin}/{worker}", params={"drain": "true"}, timeout=60).is_success
    wait_until(lambda: len(rows(page)) == WORKERS - 1, 60, "it is gone")
    assert httpx.post(admin, content=live.fleet.workers[2], timeout=60).is_success
    wait_until(lambda: [row[1] for row in rows(page)] == ["up"] * WORKERS, 60, "it is back")


def test_independent_engines_raise_no_alarm(tmp_path: Path) -> None:
    fleet = running_fleet(tmp_path, "--workers", "2", "--slots", "4", "--no-barrier")
    port = free_port()
    with fleet as engines:
        flags = ("--admin-port", f"{port}", "--overcommit", "2", *worker_flags(engines))
        with running_router(tmp_path, *flags) as router:
            replay = replay_command(
                *(router.url, tmp_path / "replay.json", "--arrivals", "closed:16"),
                *("--requests", "60000", "--trace", "burstgpt", "--max-tokens", "60"),
            )
            with starting(replay, 0, tmp_path / "replay.log"):
                for page in tab():
                    page.open(f"http://127.0.0.1:{port}/")
                    page.wait_for("document.documentElement.dataset.barrier === 'false'")
                    page.wait_for(
                        "document.getElementById('loads-about').innerText.includes('none waits')"
                    )
                    idle = page.evaluate("document.querySelector('#card-idle .value').textContent")
                    facts = page.evaluate("document.getElementById('facts').innerText")
                    ember, muted = page.evaluate(
                        "['--ember', '--muted'].map(name =>"
                        " getComputedStyle(document.documentElement).getPropertyValue(name).trim())"
                    )
                    # What queues in an engine is apart from what runs: never more than its slots.
                    page.wait_for(QUEUED)
                    running_there = [int(row[3]) for row in rows(page)]

    assert idle == "none"
    assert "do not step together" in facts
    assert ember == muted != ""
    assert all(number <= 4 for number in running_there)


QUEUED = (
    "[...document.querySelectorAll('#workers tbody tr')].some(row => row.cells[4].innerText > 0)"
)


def test_what_stands_in_where_engines_tell_nothing_is_said(live: Live, tmp_path: Path) -> None:
    port = free_port()
    urls = [spec.partition(",")[0] for spec in live.fleet.workers[:2]]
    flags = [part for url in urls for part in ("--worker", f"{url},slots=4")]
    with running_router(tmp_path, "--admin-port", f"{port}", *flags):
        for page in tab():
            page.open(f"http://127.0.0.1:{port}/")
            page.wait_for(f"{HEARD} === 'live'")
            page.wait_for("document.querySelectorAll('#facts li').length > 5")
            shown = page.evaluate(SHOWN)
            facts = page.evaluate("document.getElementById('facts').innerText")

    assert (shown["idle"], shown["power"], shown["tokens"]) == (None, None, None)
    assert "No worker tells its power" in facts
    assert "No engine tells its steps" in facts


def test_of_an_observer_it_shows_what_is_not_routed(live: Live, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "router.cli", "observe", "--admin-port", f"{port}"]
    with running([*command, *worker_flags(live.fleet)], port, tmp_path / "observe.log"):
        for page in tab():
            page.open(f"http://127.0.0.1:{port}/")
            page.wait_for("document.getElementById('tags').innerText.includes('not routed')")
            page.wait_for("document.querySelector('#card-imbalance .value').textContent > '0'")
            shown = page.evaluate(
                "[...document.querySelectorAll('#cards .card:not([hidden])')].map(card => card.id)"
            )

    assert shown == [f"card-{name}" for name in ("idle", "imbalance", "tokens", "power")]


def test_so_far_nothing_on_the_page_was_in_error(page: Page) -> None:
    entries = [told["entry"] for told in page.heard("Log.entryAdded")]

    assert page.heard("Runtime.exceptionThrown", "Runtime.consoleAPICalled") == []
    assert [entry for entry in entries if entry["level"] == "error"] == []


def test_the_stream_comes_again_when_the_router_does(live: Live, tmp_path: Path) -> None:
    port = free_port()
    flags = ("--admin-port", f"{port}", "--policy", "jsq", *worker_flags(live.fleet))
    for page in tab():
        with running_router(tmp_path, *flags):
            page.open(f"http://127.0.0.1:{port}/")
            page.wait_for(f"{HEARD} === 'live'")
        page.wait_for(f"{HEARD} === 'lost'")
        with running_router(tmp_path, *flags):
            page.wait_for(f"{HEARD} === 'live'")
