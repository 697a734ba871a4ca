"""Checks of a request's head, beyond the parser's.

llhttp checks the framing: Content-Length with Transfer-Encoding, repeated and malformed lengths,
bare line ends, folded lines, control characters, chunk sizes. Refused here is what it accepts
although two servers could read it differently (RFC 9112, 3.2, 6.1, 11.2).
"""

import re
from collections.abc import Sequence

from router.http.port import HttpLimits
from router.http.refusal import Refused

Header = tuple[bytes, bytes]

METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})

_VERSIONS = {"1.1": b" HTTP/1.1\r\n", "1.0": b" HTTP/1.0\r\n"}
_ALLOW = b"allow: " + b", ".join(sorted(METHODS)) + b"\r\n"
_HOST = re.compile(rb"(?:[\w.-]*|\[[0-9A-Fa-f:.]+\])(?::\d{0,5})?", re.ASCII)
_BLANK = b" \t"
_PLAIN = re.compile(rb"/(?:[^/#%][^#%]*)?")
_ENCODED_CONTROL = re.compile(rb"%(?:[01][0-9A-Fa-f]|7[Ff])")


def check_line(
    method: bytes, target: bytes, version: str, raw: bytes | bytearray, *, ahead: bool
) -> None:
    """Refuse a request line that differs from what the parser read: 400, 405 or 505.

    The parser tolerates extra spaces, and accepts RTSP. With ``ahead`` earlier requests may
    precede the line.
    """
    end = _VERSIONS.get(version)
    if end is None:
        raise Refused(505, f"HTTP/{version} is not spoken here: send HTTP/1.1")
    if method not in METHODS:
        raise Refused(405, f"{method.decode()} is not served here", _ALLOW)
    line = method + b" " + target + end
    # It may follow an empty line (RFC 9112, 2.2).
    there = raw.startswith((line, b"\r\n" + line)) or (ahead and line in raw)
    if not there:
        raise Refused(400, "the request line must be METHOD PATH HTTP/1.1, with single spaces")
    if _PLAIN.fullmatch(target):
        return
    if not target.startswith(b"/") or target.startswith(b"//") or b"#" in target:
        raise Refused(400, "the request target must be a path with one / first, without a host")
    if _ENCODED_CONTROL.search(target):
        raise Refused(400, "the request target has an encoded control character")


def check_fields(headers: Sequence[Header], version: str, limits: HttpLimits) -> bool:
    """Refuse ambiguous framing or Host headers: 400, 413, 417 or 501; names are in lower case.

    True if the client waits for 100 Continue.
    """
    hosts, waits = 0, False
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if not _HOST.fullmatch(value.rstrip(_BLANK)):
                raise Refused(400, "the Host header is not NAME or NAME:PORT")
        elif name == b"content-length":
            # int() takes some thousand digits only; the parser limits them, zeros aside.
            if int(value.lstrip(b"0") or b"0") > limits.max_body_bytes:
                raise body_too_large(limits)
        elif name == b"transfer-encoding":
            _check_coding(value, version)
        elif name == b"expect":
            if value.rstrip(_BLANK).lower() != b"100-continue":
                raise Refused(417, "the only Expect that is understood is 100-continue")
            waits = True
    if hosts > 1 or (not hosts and version != "1.0"):
        raise Refused(400, f"there must be one Host header, not {hosts or 'none'}")
    return waits


def check_size(target: bytes, headers: Sequence[Header], limits: HttpLimits) -> None:
    """Refuse a head that is too long; 431."""
    # Each field adds ": " and a line end; method and "HTTP/1.1" are not counted.
    size = len(target) + sum(len(name) + len(value) + 4 for name, value in headers)
    if size > limits.max_header_bytes:
        raise head_too_long(limits)


def head_too_long(limits: HttpLimits) -> Refused:
    """Refusal by total size; 431."""
    return Refused(
        431, f"request line and header fields may have {limits.max_header_bytes:,} bytes together"
    )


def too_many_headers(limits: HttpLimits) -> Refused:
    """Refusal by number; 431."""
    return Refused(431, f"a request may have {limits.max_headers:,} header fields")


def uri_too_long(limits: HttpLimits) -> Refused:
    """Refusal by length; 414."""
    return Refused(414, f"path and query may have {limits.max_uri_bytes:,} bytes together")


def body_too_large(limits: HttpLimits) -> Refused:
    """Refusal by size; 413."""
    return Refused(413, f"a request's body may have {limits.max_body_bytes:,} bytes")


def bodies_too_large(limits: HttpLimits) -> Refused:
    """Refusal for want of room beside the others."""
    message = (
        f"the bodies of open requests may have {limits.max_bodies_bytes:,} bytes together, and "
        "there is no room for this one; retry later"
    )
    return Refused(503, message, b"retry-after: 1\r\n")


def _check_coding(value: bytes, version: str) -> None:
    if version == "1.0":
        raise Refused(400, "HTTP/1.0 has no Transfer-Encoding: send Content-Length, or HTTP/1.1")
    coding = value.rstrip(_BLANK).lower()
    if coding != b"chunked":
        # Without chunks last, the body's end is unknown.
        status = 501 if coding.endswith(b"chunked") and b"," in coding else 400
        raise Refused(status, "the only Transfer-Encoding that is understood is chunked")
