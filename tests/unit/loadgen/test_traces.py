"""Trace files: published formats, every way a file can be broken, sampling."""

import gzip
from pathlib import Path

import pytest

from loadgen.traces.trace import BUNDLED, Trace, TraceRequest, load_trace
from router.core.errors import InputError

BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
)
BURSTGPT_OLD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_burstgpt_as_published(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.csv",
        BURSTGPT,
        "5,12,0.3,ChatGPT,472,18,490,Conversation log",
        "45.5,12,0,ChatGPT,1087,0,1087,Conversation log",
        "118,13,1.1,GPT-4,417,276,693,API log",
    )
    trace = load_trace(path)
    assert trace == Trace(
        "trace.csv", "BurstGPT", (TraceRequest(472, 18, 5.0), TraceRequest(417, 276, 118.0))
    )
    assert trace.max_output_tokens == 276


def test_older_burstgpt(tmp_path: Path) -> None:
    path = write(tmp_path / "x", BURSTGPT_OLD, "5,ChatGPT,472,18,490,Conversation log")
    assert load_trace(path).requests == (TraceRequest(472, 18, 5.0),)


@pytest.mark.parametrize("name", ["lengths.csv", "lengths.csv.gz", "lengths"])
def test_gzip_is_recognised_by_its_content(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = "\ufeffRequest tokens,Response tokens\r\n632,34\r\n\r\n220,7\r\n"
    path.write_bytes(gzip.compress(text.encode()))
    trace = load_trace(path)
    assert trace.format == "length sample"
    assert trace.requests == (TraceRequest(632, 34), TraceRequest(220, 7))


@pytest.mark.parametrize(
    ("stamp", "arrival_s"),
    [
        pytest.param("2023-11-16 18:15:46.6805900", 1700158546.68059, id="2023"),
        pytest.param("2024-05-10 00:00:00.009930+00:00", 1715299200.00993, id="2024"),
        pytest.param("2024-05-10 00:00:00+00:00", 1715299200.0, id="2024, a whole second"),
        pytest.param("2024-05-10 02:00:00+02:00", 1715299200.0, id="another zone"),
    ],
)
def test_azure_as_published(tmp_path: Path, stamp: str, arrival_s: float) -> None:
    path = write(tmp_path / "x", AZURE, f"{stamp},374,44")
    trace = load_trace(path)
    assert trace.format == "Azure"
    assert trace.requests[0].arrival_s == pytest.approx(arrival_s, rel=0, abs=1e-6)
    assert trace.requests == (TraceRequest(374, 44, trace.requests[0].arrival_s),)


def test_mooncake_as_published(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x",
        '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}',
        "",
        '{"timestamp": 27482, "input_length": 7322, "output_length": 0, "hash_ids": []}',
        '{"timestamp": 30535.5, "input_length": 7325, "output_length": 4, "hash_ids": [0, 9]}',
    )
    assert load_trace(path) == Trace(
        "x",
        "Mooncake",
        (
            TraceRequest(6758, 500, 0.0, (0, 1, 2)),
            TraceRequest(7325, 4, 30.5355, (0, 9)),
        ),
    )


def test_vidur_as_published(tmp_path: Path) -> None:
    header = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio"
    trace = load_trace(write(tmp_path / "x", "", header, "3772,54,3826,69.85185185185185", " "))
    assert trace == Trace("x", "Vidur", (TraceRequest(3772, 54),))


@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("burstgpt", 8000, TraceRequest(632, 34)),
        ("azure-conv", 19366, TraceRequest(374, 44, 1700158546.68059)),
        ("mooncake-synthetic", 3993, TraceRequest(40160, 6, 0.0, tuple(range(79)))),
    ],
)
def test_bundled(name: str, count: int, first: TraceRequest) -> None:
    trace = load_trace(name)
    assert trace.name == BUNDLED[name].name
    assert len(trace.requests) == count
    assert trace.requests[0] == first


def test_what_is_bundled_is_attributed() -> None:
    folder = BUNDLED["burstgpt"].parent
    names = {path.name for path in BUNDLED.values()}
    assert {path.name for path in folder.iterdir()} == {
        *names,
        "ATTRIBUTION.md",
        "LICENSE.CC-BY-4.0",
        "LICENSE.Apache-2.0",
    }
    attribution = (folder / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert all(f"# {name}" in attribution for name in names)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("632", r"row 3: has 1 fields, the header 2; correct or remove"),
        ("632,34,1", r"row 3: has 3 fields, the header 2"),
        ("many,34", r"row 3: column 'Request tokens': 'many' is not a whole number"),
        ("632,", r"row 3: column 'Response tokens': '' is not a whole number"),
        ("632,3.5", r"row 3: column 'Response tokens': '3.5' is not a whole number"),
        ("632,-1", r"row 3: column 'Response tokens': -1 is less than 0"),
        ("632,1_0", r"row 3: column 'Response tokens': '1_0' is not a whole number"),
        ("0,34", r"row 3: column 'Request tokens': 0 is less than 1"),
        ("632,100000001", r"row 3: column 'Response tokens': 100000001 is more than 100000000"),
        ('632,"' + "9" * 140_000, r"row 3: field larger than field limit"),
    ],
)
def test_broken_row(tmp_path: Path, row: str, message: str) -> None:
    path = write(tmp_path / "trace.csv", "Request tokens,Response tokens", "1,1", row, "2,2")
    with pytest.raises(InputError, match=f"trace.csv: {message}"):
        load_trace(path)


@pytest.mark.parametrize("stamp", ["soon", "", "nan", "inf", "1_0"])
def test_broken_timestamp(tmp_path: Path, stamp: str) -> None:
    path = write(tmp_path / "t", BURSTGPT_OLD, f"{stamp},ChatGPT,472,18,490,API log")
    with pytest.raises(InputError, match=rf"row 2: column 'Timestamp': '{stamp}' is not a time"):
        load_trace(path)


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (
            BURSTGPT_OLD,
            "-5,ChatGPT,472,18,490,API log",
            "column 'Timestamp': '-5' is a negative time",
        ),
        (AZURE, "2023-11-31 18:15:46,374,44", "column 'TIMESTAMP': '2023-11-31 .*' is not a time"),
        (AZURE, "1969-12-31 23:59:59,374,44", "column 'TIMESTAMP': '1969-.*' is a negative time"),
    ],
)
def test_impossible_time(tmp_path: Path, header: str, row: str, message: str) -> None:
    path = write(tmp_path / "t", header, row)
    with pytest.raises(InputError, match=f"t: row 2: {message}; correct or remove the row"):
        load_trace(path)


MOONCAKE = '{"timestamp": 5, "input_length": 9, "output_length": 1, "hash_ids": []}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (MOONCAKE[:30], r"is broken JSON \(Invalid control character"),
        ("[" * 200_000, r"is broken JSON \(maximum recursion"),
        (MOONCAKE.replace("9", "9" * 5000), r"is broken JSON \(Exceeds the limit"),
        ("[1, 2]", "is no JSON object"),
        (MOONCAKE.replace("output_length", "output"), "no column 'output_length'"),
        (MOONCAKE.replace("9", "9.5"), "column 'input_length': 9.5 is not a whole number"),
        (MOONCAKE.replace("9", "true"), "column 'input_length': True is not a whole number"),
        (MOONCAKE.replace("9", "-9"), "column 'input_length': -9 is less than 1"),
        (MOONCAKE.replace("5", "null"), "column 'timestamp': None is not a time"),
        (MOONCAKE.replace("5", "Infinity"), "column 'timestamp': inf is not a time"),
        (MOONCAKE.replace("5", "1" * 400), "column 'timestamp': 1{80} is not a time"),
        (MOONCAKE.replace("5", "-5"), "column 'timestamp': -5 is a negative time"),
    ],
)
def test_broken_json_row(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "t.jsonl", MOONCAKE, "", line)
    with pytest.raises(InputError, match=f"t.jsonl: row 3: {message}.*; correct or remove the row"):
        load_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"Request tokens,Response tokens\n", "has no request with output tokens"),
        (b"Request tokens,Response tokens\n5,0\n", "has no request with output tokens"),
        (b"Request tokens,Total tokens\n1,2\n", "row 1: no column 'Response tokens'"),
        (b'\n{"timestamp": 5, "output_length": 9}', "row 2: no column 'input_length'"),
        (b" \n\n", "is empty"),
        (b'""\n', "row 1: no column"),
        (b"Request tokens,Response tokens\n,\n", "row 2: column 'Response tokens': '' is not"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (gzip.compress(b"Request tokens,Response tokens\n1,2\n")[:-6], "broken gzip"),
        (b"\x1f\x8b\x00\x00\x00\x00\x00\x00\x00\x00", "broken gzip"),
    ],
)
def test_unusable_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_trace(path)


def test_corrupt_deflate_stream(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"Request tokens,Response tokens\n" + b"1,2\n" * 50))
    packed[12:16] = b"\xff\xff\xff\xff"
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(packed)
    with pytest.raises(InputError, match="broken gzip"):
        load_trace(path)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_trace(tmp_path / "none.csv")
    with pytest.raises(InputError, match="Is a directory"):
        load_trace(tmp_path)


ROWS = Trace("t", "f", tuple(TraceRequest(1 + i, 1, 10.0 - i) for i in range(5)))


def test_sample_draws_without_replacement_while_it_can() -> None:
    drawn = ROWS.sample(5, seed=1)
    assert sorted(row.prompt_tokens for row in drawn) == [1, 2, 3, 4, 5]
    assert drawn == ROWS.sample(5, seed=1) != ROWS.sample(5, seed=2)
    assert all(row.arrival_s is None for row in drawn)


def test_sample_resamples_when_more_are_asked_for() -> None:
    drawn = ROWS.sample(50, seed=1)
    assert len(drawn) == 50
    assert drawn == ROWS.sample(50, seed=1)
    assert {row.prompt_tokens for row in drawn} <= {1, 2, 3, 4, 5}


def test_requests_that_share_prefixes_keep_their_order() -> None:
    rows = Trace("t", "f", tuple(TraceRequest(1 + i, 1, float(i), (i,)) for i in range(3)))
    drawn = rows.sample(5, seed=1)
    assert [(row.blocks, row.arrival_s) for row in drawn] == [((i % 3,), None) for i in range(5)]
    assert rows.earliest(2)[1] == TraceRequest(2, 1, 1.0, (1,))


def test_earliest_sorts_and_starts_at_zero() -> None:
    assert ROWS.earliest(2) == (TraceRequest(5, 1, 0.0), TraceRequest(4, 1, 1.0))
    assert len(ROWS.earliest()) == 5


def test_earliest_needs_arrival_times_and_enough_rows() -> None:
    with pytest.raises(InputError, match="no arrival times; use other --arrivals"):
        load_trace().earliest(2)
    with pytest.raises(InputError, match="5 usable requests, not 6; lower --requests"):
        ROWS.earliest(6)
