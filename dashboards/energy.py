"""Energy: power of the fleet, and energy per token."""

from dashboards.panel import (
    GROUP,
    Board,
    Query,
    lines,
    of_group,
    of_worker,
    rate,
    ratio,
    row,
    stacked,
    stat,
)

_ENERGY = "evenstep_energy_joules_total"
_TIMED = "evenstep_timed_worker_seconds_total"
_COMPLETED = rate("evenstep_requests_total", where=GROUP + ',outcome="completed"')

SPENT = row(
    "What is spent",
    lines(
        "Power of the fleet",
        "Sum of what workers last reported.",
        of_group("evenstep_worker_power_watts"),
        unit="watt",
    ),
    lines(
        "Power of each worker",
        "What the worker last reported; no line where engines do not report power.",
        of_worker("evenstep_worker_power_watts"),
        unit="watt",
    ),
    stat(
        "Energy in the time shown",
        "What workers used in their steps, in the time range at the top.",
        f"sum by (group) (increase({_ENERGY}{{{GROUP}}}[$__range]))",
        width=8,
        unit="joule",
    ),
)

_USES = (
    ("useful", "evenstep_useful_energy_joules_total"),
    ("waiting", "evenstep_waiting_energy_joules_total"),
    ("idle", "evenstep_idle_energy_joules_total"),
    ("not divided", "evenstep_undivided_energy_joules_total"),
)
_ALL = " + ".join(rate(name) for _, name in _USES)

BARRIER = row(
    "What the barrier costs",
    stacked(
        "Where the energy goes",
        "Useful: computing. Waiting: in steps, for the fullest worker; what balancing can save. "
        "Idle: between steps, with nothing to run. Not divided: of steps that are known only as a "
        "whole; calibrate with --power-levels. Together: all that meters counted.",
        *(Query(rate(name), f"{{{{group}}}} {use}") for use, name in _USES),
        unit="watt",
    ),
    lines(
        "Power by what workers do",
        "Watts of a worker at rest, waiting in steps and computing, fitted to what the meters have "
        "counted; evenstep calibrate makes --power-levels of it. Empty until workers have done "
        "enough of each.",
        of_group("evenstep_fitted_power_watts", "avg", "group, state"),
        unit="watt",
    ),
    stacked(
        "What metered workers do",
        "Workers' seconds per second: idle between steps, waiting in steps, computing; unknown "
        "where it is not known how long they waited.",
        rate("evenstep_metered_seconds_total", "group, state"),
    ),
    lines(
        "Share of energy spent waiting",
        "Energy of waiting for the fullest worker by all energy. 0 where workers are even, or "
        "while --power-levels are not calibrated.",
        f"{rate('evenstep_waiting_energy_joules_total')} / ({_ALL})",
        unit="percentunit",
    ),
    lines(
        "Idle share of steps",
        "Share of workers' time in steps in which they wait for the fullest one; and in which "
        "engines have timed their waits themselves. The rest is modelled, by the fitted time that "
        "a step takes for each KV token.",
        ratio("evenstep_waiting_seconds_total", _TIMED),
        timed_by_engines=ratio("evenstep_measured_worker_seconds_total", _TIMED),
        unit="percentunit",
    ),
)

COST = row(
    "What it buys",
    lines(
        "Energy per output token",
        "Energy of all workers' steps by the tokens that they decoded. It falls when fewer workers "
        "wait for the most loaded one, and when batches are larger.",
        ratio(_ENERGY, "evenstep_output_tokens_total"),
        unit="joule",
    ),
    lines(
        "All energy per output token",
        "The same with what workers spent between steps, by their meters alone: what the recording "
        "rule group:evenstep_energy_joules_per_output_token:rate5m keeps.",
        f"({_ALL}) / {rate('evenstep_output_tokens_total')}",
        unit="joule",
    ),
    lines(
        "Energy per completed request",
        "The same by requests that were answered to the end; long answers cost more.",
        f"{rate(_ENERGY)} / {_COMPLETED}",
        unit="joule",
    ),
    stacked(
        "Power in steps, busy and less busy",
        "Energy of steps per second: while requests waited in the router (the fleet was full), and "
        "while none did.",
        Query(rate(_ENERGY, "group, pool"), "{{group}}, pool {{pool}}"),
        unit="watt",
    ),
)

ENERGY = Board(
    "energy",
    "Energy",
    "What does the fleet draw, and what does a token cost? Needs engines that report power.",
    (SPENT, BARRIER, COST),
)
