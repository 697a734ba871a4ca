"""``evenstep calibrate``: power levels fitted to the workers' measured energy."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import httpx
import typer
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from router.commands.json_output import STDOUT, json_option, write_json
from router.commands.options import flag
from router.core.energy.joules import PowerLevels
from router.core.energy.levels import LEAST_S, STATES
from router.core.errors import ConfigError, InputError

_TIMEOUT_S = 5.0
_SECONDS, _WATTS = "evenstep_metered_seconds_total", "evenstep_fitted_power_watts"
_MENDS = {
    "idle": "let the workers rest for a while, with their meters on",
    "waiting": "have requests of different lengths running on several workers that step together",
    "computing": "have requests running",
}


def calibrate(
    url: Annotated[str, flag("URL of the router, or of evenstep observe", "URL")],
    group: Annotated[str | None, flag("workers' group, if there are several", "NAME")] = None,
    json_file: Annotated[str | None, json_option("write levels and seconds; - is stdout")] = None,
) -> None:
    """Print --power-levels, fitted to the workers' measured energy.

    A router fits them to all steps since its start. Let its workers rest for some seconds, then
    give them uneven load, then run this command. It exits with 2 while the data do not suffice.
    """
    seconds, watts = _measured(_metrics(f"{url.rstrip('/')}/metrics"), group)
    for state in STATES:
        if seconds[state] < LEAST_S:
            raise InputError(
                f"not enough is known yet: the workers have been {state} for "
                f"{seconds[state]:.1f} s of the {LEAST_S:g} s that it takes; {_MENDS[state]}"
            )
    if not watts:
        raise InputError(
            "the watts of each state cannot be separated yet: give the workers more load, in "
            "changing proportions, with uneven load and rests"
        )
    levels = [watts[state] for state in STATES]
    try:
        PowerLevels(*levels)
    except ConfigError as error:
        raise InputError(
            f"the measured power does not give three levels ({error}): it does not follow the "
            "modelled waiting here; calibrate on steps that depend more on the load"
        ) from None
    if json_file != STDOUT:
        typer.echo(f"--power-levels {','.join(f'{level:.0f}' for level in levels)}")
        spent = ", ".join(f"{seconds[state]:,.0f} s {state}" for state in STATES)
        typer.echo(f"fitted to {spent}, summed over workers", err=True)
    write_json({"power_levels_w": levels, "seconds": dict(seconds)}, json_file)


def _metrics(address: str) -> Sequence[Metric]:
    try:
        answer = httpx.get(address, timeout=_TIMEOUT_S)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        raise ConfigError(f"--url: {address} is no URL; write http://HOST:PORT") from None
    except httpx.HTTPError as error:
        raise ConfigError(f"--url: nothing answers at {address} ({error})") from None
    if answer.status_code != httpx.codes.OK:
        raise ConfigError(f"--url: {address} answers {answer.status_code}; give the router's URL")
    try:
        return list(text_string_to_metric_families(answer.text))
    except ValueError:
        raise ConfigError(
            f"--url: {address} answers with no metrics; give the router's URL"
        ) from None


def _measured(
    families: Iterable[Metric], group: str | None
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The chosen group's seconds and fitted watts, by state."""
    found: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for family in families:
        for sample in family.samples:
            if sample.name in {_SECONDS, _WATTS}:
                found[sample.labels["group"], sample.name][sample.labels["state"]] = sample.value
    groups = sorted({name for (name, _), states in found.items() if sum(states.values()) > 0})
    chosen = group or (groups[0] if len(groups) == 1 else None)
    if not groups:
        raise InputError(
            "no worker has a meter yet: the plug-in beside its engine, or evenstep agent, reports "
            "power, and the router knows it from the first steps on"
        )
    if chosen not in groups:
        raise ConfigError(f"--group: there is {', '.join(groups)}; choose one")
    return found[chosen, _SECONDS], found[chosen, _WATTS]
