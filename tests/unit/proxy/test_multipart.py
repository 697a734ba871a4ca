"""The model in a form with files, wherever it lies."""

import httpx
import pytest

from router.core.errors import InvalidRequestError
from router.proxy.multipart import find_model, with_model

SOUND = bytes(range(256)) * 700


def form(*fields: tuple[str, bytes]) -> tuple[bytes, bytes]:
    """Content type and body of a form with these fields."""
    parts = (
        f'--cut\r\nContent-Disposition: form-data; name="{field}"\r\n'.encode()
        + (b"Content-Type: audio/wav\r\n" if field == "file" else b"")
        + b"\r\n"
        + value
        + b"\r\n"
        for field, value in fields
    )
    return b"multipart/form-data; boundary=cut", b"".join(parts) + b"--cut--\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        [("model", b"whisper"), ("file", SOUND)],
        [("file", SOUND), ("language", b"en"), ("model", b"whisper")],
        [("prompt", b"model"), ("model", b"whisper"), ("model", b"other")],
        # Wherever a slice of the body ends, within the name as well.
        *([("file", b"x" * (65_536 - at)), ("model", b"whisper")] for at in range(40, 240, 9)),
    ],
)
def test_a_model_is_found_and_set_anew(fields: list[tuple[str, bytes]]) -> None:
    content_type, body = form(*fields)

    found = find_model(content_type, body)

    assert found is not None
    assert found.value == "whisper"
    assert with_model(body, found, "whisper") == body
    again = with_model(body, found, "openai/whisper-large")
    first = find_model(content_type, again)
    assert first is not None
    assert first.value == "openai/whisper-large"
    assert len(again) - len(body) == len("openai/-large")


def test_what_clients_send() -> None:
    request = httpx.Request(
        "POST", "http://x/", data={"model": "tiny"}, files={"file": ("a.wav", SOUND)}
    )
    body = request.read()

    found = find_model(request.headers["content-type"].encode(), body)

    assert found is not None
    assert body[found.start : found.end] == b"tiny"


def test_a_form_without_a_model() -> None:
    assert find_model(*form(("file", SOUND))) is None
    empty = find_model(*form(("model", b"")))
    assert empty is None or empty.value == ""
    assert find_model(b"multipart/form-data; boundary=cut", b"") is None
    assert find_model(b"multipart/form-data; boundary=cut", form(("model", b"x"))[1][:60]) is None


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        (b"multipart/form-data", b"", "needs a boundary"),
        (b"multipart/form-data; boundary=" + b"x" * 300, b"", "not a form"),
        (b"multipart/form-data; boundary=cut", b"model=tiny", "not a form"),
        (b"multipart/form-data; boundary=cut", b"--cut\r\nbad header\r\n", "not a form"),
        (b"multipart/form-data; boundary=cut", b"--cut\r\nx: " + b"y" * 9000, "not a form"),
        (b"multipart/form-data; boundary=cut", b"--cut\r\nx" + b"y" * 9000, "not a form"),
        (*form(*[("x", b"")] * 101), "100 parts"),
        (*form(("model", b"x" * 1025)), "too long"),
    ],
)
def test_no_form(content_type: bytes, body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        find_model(content_type, body)
