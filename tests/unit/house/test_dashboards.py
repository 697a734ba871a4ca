"""The committed dashboards are the generator's, and ask for metrics that exist, all of them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dashboards.generate import BOARDS, FOLDER, stale
from dashboards.panel import Board, Panel
from tests.support.metric_names import OTHERS, asked, own_metrics

# Named by the router, and not drawn.
LEFT_OUT: set[str] = set()


def drawn() -> set[str]:
    return {
        name for panel in panels() for query in panel.queries for name in asked(query.expression)
    }


def panels() -> Iterator[Panel]:
    for board in BOARDS:
        for row in board.rows:
            yield from row.panels


def test_committed_files_are_what_the_generator_makes() -> None:
    assert [path.name for path in stale()] == []
    assert {path.stem for path in FOLDER.glob("*.json")} == {board.name for board in BOARDS}


def test_panels_ask_for_metrics_that_exist() -> None:
    assert drawn() - own_metrics() - OTHERS == set()


def test_every_metric_is_drawn_or_left_out_on_purpose() -> None:
    assert own_metrics() - drawn() - LEFT_OUT == set(), (
        "draw them in a panel, or name them in LEFT_OUT"
    )
    assert drawn() & LEFT_OUT == set()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_grafana_is_told_everything(board: Board) -> None:
    said: dict[str, Any] = json.loads((FOLDER / f"{board.name}.json").read_text())
    pictures = [panel for panel in said["panels"] if panel["type"] != "row"]

    assert [variable["name"] for variable in said["templating"]["list"]] == [
        "datasource",
        "group",
        "worker",
    ]
    assert len({panel["id"] for panel in said["panels"]}) == len(said["panels"])
    assert [panel["title"] for panel in pictures] == [
        panel.title for row in board.rows for panel in row.panels
    ]
    for panel in pictures:
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) > 0


def test_panels_do_not_overlap() -> None:
    for path in FOLDER.glob("*.json"):
        cells: set[tuple[int, int]] = set()
        for panel in json.loads(path.read_text())["panels"]:
            at = panel["gridPos"]
            own = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not own & cells, (path.name, panel["title"])
            cells |= own


def test_every_panel_of_a_worker_names_its_rank() -> None:
    told = [
        query.legend
        for panel in panels()
        for query in panel.queries
        if "{{worker}}" in query.legend
    ]

    assert told
    assert all("{{rank}}" in legend for legend in told)
