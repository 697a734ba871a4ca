"""The page names every key of ``evenstep plan``'s file, and what holds where one is left out."""

import re

import pytest
from pydantic import BaseModel

from loadgen.planner.plan_file import (
    EngineTable,
    ModelTable,
    ServerTable,
    TimesTable,
    WorkloadTable,
)
from tests.support.docs import text_of

PAGE = "docs/chains.md"
TEXT = text_of(PAGE)


@pytest.mark.parametrize(
    ("header", "table"),
    [
        ("[model]", ModelTable),
        ("[workload]", WorkloadTable),
        ("[[servers]]", ServerTable),
        ("[engine]", EngineTable),
        ("[times]", TimesTable),
    ],
)
def test_every_key_is_named(header: str, table: type[BaseModel]) -> None:
    (row,) = re.findall(rf"^\| `{re.escape(header)}` \|(.*)$", TEXT, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", row))
    assert set(table.model_fields) <= named
    for name, field in table.model_fields.items():
        if isinstance(field.default, int | float):
            of_it = row.partition(f"`{name}`")[2]
            assert f"({field.default:g})" in of_it, name
