"""Forms with files: read or replace the model that they name, nothing else."""

from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.core.errors import InvalidRequestError

FORM = b"multipart/form-data"

_MOST_PARTS = 100
_SLICE_BYTES = 64 * 1024
_LONGEST_NAME_BYTES = 1024
_LONGEST_HEADER_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True)
class Field:
    """Position and value of a form field."""

    start: int
    end: int
    value: str


def find_model(content_type: bytes, body: bytes) -> Field | None:
    """The first field ``model``; parsing stops there."""
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not boundary:
        raise InvalidRequestError("multipart/form-data needs a boundary in its Content-Type")
    try:
        reader = _Reader(boundary)
        for at in range(0, len(body), _SLICE_BYTES):
            if (found := reader.read(body, at)) is not None:
                return found
    except FormParserError as error:
        raise InvalidRequestError(f"the body is not a form: {error}") from error
    return None


def with_model(body: bytes, field: Field, model: str) -> bytes:
    """The form with another model."""
    return body[: field.start] + model.encode() + body[field.end :]


class _Reader:
    def __init__(self, boundary: bytes) -> None:
        self._at = 0
        self._parts = 0
        self._header = self._value = b""
        self._is_model = False
        self._place: tuple[int, int] | None = None
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_begin": self._begin_header,
                "on_header_field": self._read_header,
                "on_header_value": self._read_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_data,
                "on_part_data": self._read_data,
                "on_part_end": self._end_part,
            },
        )

    def read(self, body: bytes, at: int) -> Field | None:
        self._at = at
        self._parser.write(body[at : at + _SLICE_BYTES])
        if not self._ended or self._place is None:
            return None
        start, end = self._place
        if end - start > _LONGEST_NAME_BYTES:
            raise InvalidRequestError("'model' is too long", param="model")
        return Field(start, end, body[start:end].decode("utf-8", "replace"))

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise InvalidRequestError(f"a form may have {_MOST_PARTS} parts before its 'model'")
        self._is_model = False

    def _begin_header(self) -> None:
        self._header = self._value = b""

    def _read_header(self, data: bytes, start: int, end: int) -> None:
        self._header = _longer(self._header, data[start:end])

    def _read_value(self, data: bytes, start: int, end: int) -> None:
        self._value = _longer(self._value, data[start:end])

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._is_model = parse_options_header(self._value)[1].get(b"name") == b"model"

    def _begin_data(self) -> None:
        if self._is_model and self._place is None:
            self._place = (0, 0)

    def _read_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_model and not self._ended and self._place is not None:
            first = self._place[0] or self._at + start
            self._place = (first, self._at + end)

    def _end_part(self) -> None:
        self._ended |= self._is_model


def _longer(header: bytes, more: bytes) -> bytes:
    if len(header) + len(more) > _LONGEST_HEADER_BYTES:
        raise InvalidRequestError("the body is not a form: a part's header is too long")
    return header + more
