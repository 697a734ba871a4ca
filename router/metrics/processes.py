"""Metrics of the router's own processes."""

from __future__ import annotations

PROCESSES = (
    "evenstep_processes",
    "Processes of the router that run: the one that decides, and proxies where there are several "
    "(--processes).",
)
BROKEN = (
    "evenstep_process_connection_errors_total",
    "Connections between the router's processes that an error has ended; they connect anew.",
)
RESTARTS = (
    "evenstep_process_restarts_total",
    "Times that a process of the router was started again after it had failed.",
)
