"""The conditions of arXiv 2601.17855, section 6, where they differ from those of ``serve``."""

from collections.abc import Mapping
from typing import Any

from loadgen.simulator.decode.oracle import Knowledge

PAPER: Mapping[str, Any] = {"deadline_steps": 0, "overcommit": 0, "knowledge": Knowledge("none")}
