"""What the page says of prefix caches is what the code does, and what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from docs.prefix_tables import foretold_texts, index_cost, plugin_cost
from engine_patches.stream import cached_blocks
from loadgen.figures.tables import Table
from router.core.prefix import block_index, correspondence, sent_prompts, sessions
from router.core.prefix.text_chunks import CHUNK_BYTES
from router.metrics.prefixes import PREFIX_ROWS
from tests.support.docs import text_of, words

PAGE = "docs/prefixes.md"
SAID = words(text_of(PAGE))
DATA = Path(__file__).resolve().parents[1] / "data/prefix"


def kept(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def test_bounds_are_those_of_the_code() -> None:
    assert f"chunks of {CHUNK_BYTES} bytes" in SAID
    assert f"{block_index.MOST_BLOCKS:,} distinct blocks" in SAID
    assert f"{correspondence.MOST_BYTES >> 20} MiB for each size of block" in SAID
    assert f"else {sent_prompts.MOST_TOKENS:,}" in SAID
    assert sent_prompts.KEPT_S == 600
    assert "not computed for ten minutes" in SAID
    assert f"longer one than {sessions.MOST_NAME_BYTES} bytes" in SAID
    assert f"more than {cached_blocks.MOST_BLOCKS:,} blocks" in SAID


def test_metrics_that_it_names_exist() -> None:
    names = set(PREFIX_ROWS)
    for end in ("found_tokens", "prompt_tokens", "right_requests", "blocks_dropped"):
        assert f"evenstep_prefix_{end}_total" in names
        assert f"`evenstep_prefix_{end}_total`" in SAID
    assert "evenstep_prefix_error_tokens_total" in names


@pytest.mark.parametrize("table", [index_cost, foretold_texts, plugin_cost])
def test_the_tables_are_what_was_measured(table: Any) -> None:
    made: Table = table()
    lines = text_of(PAGE).splitlines()
    assert made.rows
    assert [row for row in made.rows if f"| {' | '.join(row)} |" not in lines] == []


def test_a_large_fleet_costs_as_little_as_was_wanted() -> None:
    rows = [row for row in kept("index.json")["index"] if row["workers"] == 256]
    assert {row["block_tokens"] for row in rows} == {16, 64, 512}
    assert {row["tokens"] for row in rows} == {1_000_000}
    assert max(row["memory_mb"] for row in rows) <= 1500
    assert all(row["stored_us"] <= 5 for row in rows)


def test_texts_are_foretold_within_a_chunk() -> None:
    blocks = kept("text.json")["blocks"]
    assert all(row["all"]["within_a_chunk"] >= 0.97 for row in blocks)
