"""``evenstep solve``: one decision of BF-IO from a file, and on demand its optimum."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from router.commands.json_output import STDOUT, json_option, write_json
from router.commands.options import flag
from router.config.given_files import read_json
from router.core.errors import ConfigError, InputError
from router.core.forecast.forecast import Ints
from router.core.policies.bfio.instances import from_json
from router.core.policies.bfio.solver import DEFAULT_MOVES, Instance, solve

if TYPE_CHECKING:
    from router.core.policies.bfio.exact import ExactSolution


def solve_file(
    file: Annotated[
        str,
        typer.Argument(metavar="INSTANCE.json", help="the decision's loads, candidates and room"),
    ],
    exact: Annotated[
        bool, flag("prove the optimum with HiGHS; without the tie weight", name="--exact")
    ] = False,
    moves: Annotated[
        int, flag("budget of the router's own solver", "N", least=0, most=10**12)
    ] = DEFAULT_MOVES,
    time_limit: Annotated[float, flag("seconds that HiGHS may take", "S", least=0)] = 60.0,
    json_file: Annotated[str | None, json_option("write the result; - is stdout")] = None,
) -> None:
    """Assign the waiting requests of a file to workers, as bfio does.

    router/core/policies/bfio/instances.py has the format of the file.
    """
    instance = _read(Path(file))
    console = Console(stderr=json_file == STDOUT)
    if exact and instance.tie_weight:
        console.print(f"tie weight {instance.tie_weight:g} left out: the exact program is linear")
        instance = replace(instance, tie_weight=0.0)
    with np.errstate(all="ignore"):
        solution = solve(instance, moves)
    if not math.isfinite(solution.objective):
        raise InputError(f"{file}: tie_weight cannot stand beside weights so close to 0")
    lines = [f"solver: objective {solution.objective:,.1f} after {solution.moves} moves"]
    report: dict[str, Any] = {
        "tie_weight": instance.tie_weight,
        "objective": solution.objective,
        "moves": solution.moves,
        "places": solution.places.tolist(),
    }
    places = solution.places
    if exact:
        optimum = _optimum(instance, places, time_limit)
        places = optimum.places
        gap, most = (_gap(solution.objective, best) for best in (optimum.objective, optimum.bound))
        known = "proven" if optimum.proven else "not proven in time"
        lines += [
            f"HiGHS: objective {optimum.objective:,.1f}, bound {optimum.bound:,.1f} ({known})",
            f"gap of the solver: {_percent(gap)}, at most {_percent(most)}",
        ]
        report["gap_percent"] = gap
        report["exact"] = {
            "objective": optimum.objective,
            "bound": optimum.bound,
            "proven": optimum.proven,
            "places": places.tolist(),
        }
    console.print(_placement(instance, places))
    for line in lines:
        console.print(line, highlight=False)
    write_json(report, json_file)


def _read(file: Path) -> Instance:
    found = read_json(file)
    try:
        return from_json(found)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def _optimum(instance: Instance, start: Ints, time_limit_s: float) -> ExactSolution:
    try:
        from router.core.policies.bfio.exact import solve_exact
    except ImportError as error:
        raise ConfigError(
            f"--exact needs HiGHS ({error}); install it with: pip install highspy "
            "(it is in the extra dev of evenstep)"
        ) from error
    return solve_exact(instance, time_limit_s, start)


def _placement(instance: Instance, places: Ints) -> Table:
    """A row for each worker with free slots."""
    after = instance.loads_after(places)
    title = (
        f"{len(instance.loads)} workers, {len(instance.candidates)} candidates, "
        f"{np.count_nonzero(places >= 0)} enter, {len(instance.weights)} steps"
    )
    table = Table("worker", "free", "load", "load then", "candidates (size)", title=title, box=None)
    for worker in np.flatnonzero(instance.capacity > 0):
        entered = np.flatnonzero(places == worker)
        sizes = ", ".join(f"{at} ({instance.candidates[at, 0]:g})" for at in entered)
        loads = instance.loads[worker, 0], after[worker, 0]
        table.add_row(
            str(worker), str(instance.capacity[worker]), *(f"{load:,.0f}" for load in loads), sizes
        )
    return table


def _gap(objective: float, best: float) -> float | None:
    """In percent; None if the best value is 0."""
    if objective <= best:
        return 0.0
    return 100 * (objective / best - 1) if best > 0 else None


def _percent(gap: float | None) -> str:
    return "unknown" if gap is None else f"{gap:.3f} %"
