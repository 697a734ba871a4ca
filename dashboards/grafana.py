"""Boards in Grafana's format, by Grafana's own types (grafana-foundation-sdk)."""

import json

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
)

from dashboards.panel import Board, Panel

TAG = "evenstep"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = {"lines": 8, "stacked": 8, "stat": 4}


def render(board: Board) -> str:
    """The JSON file of a board."""
    return json.dumps(_dashboard(board).build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _dashboard(board: Board) -> dashboard.Dashboard:
    siblings = dashboard.DashboardLink("evenstep").type(DashboardLinkType.DASHBOARDS).tags([TAG])
    siblings = siblings.include_vars(True).keep_time(True)
    made = (
        dashboard.Dashboard(f"evenstep: {board.title}")
        .uid(f"evenstep-{board.name}")
        .description(board.description)
        .tags([TAG])
        .time("now-30m", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(siblings)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .with_variable(_choice("group", "Group", "label_values(evenstep_pool_requests, group)"))
        .with_variable(
            _choice("worker", "Worker", 'label_values(evenstep_worker_up{group=~"$group"}, worker)')
        )
    )
    ids = iter(range(1, 1000))
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            made = made.with_panel(_panel(panel).id(next(ids)))
    return made


def _choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A variable with several choices; initially all."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all"))
    )


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    made = stat.Panel() if panel.kind == "stat" else _lines(panel)
    made = (
        made.title(panel.title)
        .description(panel.description)
        .datasource(SOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(HEIGHT[panel.kind])
    )
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend)
        made = made.with_target(target.ref_id(letter).datasource(SOURCE).range())
    return made


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    made = (
        timeseries.Panel()
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .fill_opacity(8)
    )
    if panel.kind == "stacked":
        made = made.fill_opacity(40).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return made
