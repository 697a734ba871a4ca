"""HTTP requests that are to be refused, with the status that each gets."""

from tests.support.raw_http import BODY, HOST, LENGTH, VALID, chunked, message

# Limits of the router that they are sent to, small enough to be passed quickly.
MAX_BODY = 65_536
LIMIT_FLAGS = ("--max-body-bytes", str(MAX_BODY), "--keep-alive-timeout", "300")

_SIZE = b"%x\r\n%b\r\n" % (len(BODY), BODY)
_END = b"0\r\n\r\n"


def _length(value: bytes) -> bytes:
    return message(HOST, b"Content-Length: " + value, body=BODY)


def _coding(value: bytes, *more: bytes) -> bytes:
    return message(HOST, b"Transfer-Encoding: " + value, *more, body=_SIZE + _END)


def _field(text: bytes) -> bytes:
    return message(HOST, text, LENGTH, body=BODY)


def _line(line: bytes) -> bytes:
    return message(HOST, LENGTH, line=line, body=BODY)


def _host(*fields: bytes) -> bytes:
    return message(*fields, LENGTH, body=BODY)


LENGTHS = {
    "length and coding": (400, message(HOST, LENGTH, b"Transfer-Encoding: chunked", body=_END)),
    "coding and length": (400, message(HOST, b"Transfer-Encoding: chunked", LENGTH, body=_END)),
    "length and coding in capitals": (400, message(HOST, LENGTH, b"TRANSFER-ENCODING: CHUNKED")),
    "length 0 and coding": (400, _coding(b"chunked", b"Content-Length: 0")),
    "length twice, the same": (400, message(HOST, LENGTH, LENGTH, body=BODY)),
    "length twice, another": (400, message(HOST, LENGTH, b"Content-Length: 3", body=BODY)),
    "length in a list": (400, _length(b"%d, %d" % (len(BODY), len(BODY)))),
    "length with plus": (400, _length(b"+%d" % len(BODY))),
    "length below 0": (400, _length(b"-1")),
    "length in hex": (400, _length(b"0x10")),
    "length with a point": (400, _length(b"10.0")),
    "length with an exponent": (400, _length(b"1e1")),
    "length with a space inside": (400, _length(b"1 0")),
    "length with an underscore": (400, _length(b"1_0")),
    "length of letters": (400, _length(b"ten")),
    "length empty": (400, _length(b"")),
    "length of 2^64": (400, _length(b"18446744073709551616")),
    "length of 30 digits": (400, _length(b"9" * 30)),
    "length in other digits": (400, _length("１０".encode())),
    "length with a vertical tab": (400, _length(b"\x0b10")),
    "length, space before the colon": (400, message(HOST, b"Content-Length : 10", body=BODY)),
    "coding gzip": (400, _coding(b"gzip")),
    "coding identity": (400, _coding(b"identity")),
    "coding empty": (400, _coding(b"")),
    "coding with a letter too many": (400, _coding(b"xchunked")),
    "coding chunked, gzip": (400, _coding(b"chunked, gzip")),
    "coding gzip, chunked": (501, _coding(b"gzip, chunked")),
    "coding chunked twice": (400, _coding(b"chunked", b"Transfer-Encoding: chunked")),
    "coding chunked, chunked": (400, _coding(b"chunked, chunked")),
    "coding with a vertical tab": (400, _coding(b"\x0bchunked")),
    "coding with a quote": (400, _coding(b'"chunked"')),
    "coding, space before the colon": (
        400,
        message(HOST, b"Transfer-Encoding : chunked", LENGTH, body=BODY),
    ),
    "coding, tab before the colon": (
        400,
        message(HOST, b"Transfer-Encoding\t: chunked", LENGTH, body=BODY),
    ),
    "coding, folded": (400, message(HOST, b"Transfer-Encoding:\r\n chunked", body=_SIZE + _END)),
    "coding in HTTP/1.0": (
        400,
        message(b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.0", body=_SIZE + _END),
    ),
}

CHUNKS = {
    "chunk size with 0x": (400, chunked(b"0x3\r\nabc\r\n" + _END)),
    "chunk size with plus": (400, chunked(b"+3\r\nabc\r\n" + _END)),
    "chunk size below 0": (400, chunked(b"-3\r\nabc\r\n" + _END)),
    "chunk size after a space": (400, chunked(b" 3\r\nabc\r\n" + _END)),
    "chunk size before a space": (400, chunked(b"3 \r\nabc\r\n" + _END)),
    "chunk size empty": (400, chunked(b"\r\nabc\r\n" + _END)),
    "chunk size of other letters": (400, chunked(b"g\r\nabc\r\n" + _END)),
    "chunk size beyond 2^64": (400, chunked(b"10000000000000003\r\nabc\r\n" + _END)),
    "chunk size, bare LF": (400, chunked(b"3\nabc\r\n" + _END)),
    "chunk size, bare CR": (400, chunked(b"3\rabc\r\n" + _END)),
    "chunk too long": (400, chunked(b"3\r\nabcd\r\n" + _END)),
    "chunk without an end": (400, chunked(b"3\r\nabc0\r\n\r\n")),
    "chunk ended by a bare LF": (400, chunked(b"3\r\nabc\n" + _END)),
    "extension with a bare LF": (400, chunked(b"3;a\nb\r\nabc\r\n" + _END)),
    "extension with NUL": (400, chunked(b"3;a\x00b\r\nabc\r\n" + _END)),
    "extension that is a quote": (400, chunked(b'3;a="b\r\nabc\r\n' + _END)),
    "last chunk ended by a bare LF": (400, chunked(_SIZE + b"0\n\r\n")),
    "body ended by a bare LF": (400, chunked(_SIZE + b"0\r\n\n")),
    "length behind the body": (400, chunked(_SIZE + b"0\r\nContent-Length: 3\r\n\r\n")),
    "coding behind the body": (400, chunked(_SIZE + b"0\r\nTransfer-Encoding: chunked\r\n\r\n")),
    "bare LF behind the body": (400, chunked(_SIZE + b"0\r\nX: y\n\r\n")),
    "folded behind the body": (400, chunked(_SIZE + b"0\r\nX: y\r\n z\r\n\r\n")),
    "NUL behind the body": (400, chunked(_SIZE + b"0\r\nX: \x00\r\n\r\n")),
}

FIELDS = {
    "bare LF after a field": (400, message(HOST, b"X: a\nY: b", LENGTH, body=BODY)),
    "bare LF after the line": (400, b"POST /v1/completions HTTP/1.1\nHost: a\r\n\r\n"),
    "bare LF at the end": (400, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n\n"),
    "bare LFs everywhere": (400, VALID.replace(b"\r\n", b"\n")),
    "bare CRs everywhere": (400, VALID.replace(b"\r\n", b"\r")),
    "bare CR in a value": (400, _field(b"X: a\rb")),
    "bare CR before a field": (400, _field(b"X: a\rContent-Length: 3")),
    "LF before CR": (400, _field(b"X: a\n\rY: b")),
    "folded by a space": (400, _field(b"X: a\r\n b")),
    "folded by a tab": (400, _field(b"X: a\r\n\tb")),
    "folded after nothing": (400, _field(b"X:\r\n b")),
    "folded first field": (400, message(b" X: a", HOST, LENGTH, body=BODY)),
    "folded Host": (400, _host(b"Host:\r\n localhost")),
    "no colon": (400, _field(b"X")),
    "no name": (400, _field(b": a")),
    "space in a name": (400, _field(b"X Y: a")),
    "space before the colon": (400, _field(b"X : a")),
    "NUL in a name": (400, _field(b"X\x00: a")),
    "a bracket in a name": (400, _field(b"X(: a")),
    "high byte in a name": (400, _field(b"X\xe9: a")),
    "NUL in a value": (400, _field(b"X: a\x00b")),
    "SOH in a value": (400, _field(b"X: a\x01b")),
    "ESC in a value": (400, _field(b"X: a\x1bb")),
    "DEL in a value": (400, _field(b"X: a\x7fb")),
    "websocket": (400, _field(b"Connection: Upgrade\r\nUpgrade: websocket")),
    "h2c": (400, _field(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c")),
    "an expectation": (417, _field(b"Expect: 200-ok")),
}

HOSTS = {
    "no host": (400, _host()),
    "two hosts": (400, _host(HOST, b"Host: other")),
    "two hosts, the same": (400, _host(HOST, HOST)),
    "two hosts in HTTP/1.0": (400, message(HOST, HOST, LENGTH, line=b"POST / HTTP/1.0", body=BODY)),
    "hosts in a list": (400, _host(b"Host: localhost, other")),
    "host with a space": (400, _host(b"Host: local host")),
    "host with a path": (400, _host(b"Host: localhost/v1")),
    "host with a user": (400, _host(b"Host: me@localhost")),
    "host with a scheme": (400, _host(b"Host: http://localhost")),
    "host with letters for a port": (400, _host(b"Host: localhost:http")),
    "host with two ports": (400, _host(b"Host: localhost:1:2")),
    "host with a long port": (400, _host(b"Host: localhost:123456")),
    "host in half a bracket": (400, _host(b"Host: [::1")),
    "host with high bytes": (400, _host("Host: bücher".encode())),
}

LINES = {
    "absolute form": (400, _line(b"POST http://localhost/v1/completions HTTP/1.1")),
    "https": (400, _line(b"POST https://localhost/v1/completions HTTP/1.1")),
    "a star": (400, _line(b"OPTIONS * HTTP/1.1")),
    "no slash": (400, _line(b"POST v1/completions HTTP/1.1")),
    "two slashes": (400, _line(b"POST //v1/completions HTTP/1.1")),
    "a fragment": (400, _line(b"POST /v1/completions#a HTTP/1.1")),
    "no target": (400, _line(b"POST HTTP/1.1")),
    "two spaces before the target": (400, _line(b"POST  /v1/completions HTTP/1.1")),
    "two spaces behind the target": (400, _line(b"POST /v1/completions  HTTP/1.1")),
    "a space in the target": (400, _line(b"POST /v1/ completions HTTP/1.1")),
    "a space at the end": (400, _line(b"POST /v1/completions HTTP/1.1 ")),
    "a space at the beginning": (400, _line(b" POST /v1/completions HTTP/1.1")),
    "tabs for spaces": (400, _line(b"POST\t/v1/completions\tHTTP/1.1")),
    "NUL in the target": (400, _line(b"POST /v1/\x00completions HTTP/1.1")),
    "DEL in the target": (400, _line(b"POST /v1/\x7fcompletions HTTP/1.1")),
    "high byte in the target": (400, _line(b"POST /v1/\xe9completions HTTP/1.1")),
    "encoded NUL": (400, _line(b"POST /v1/completions%00 HTTP/1.1")),
    "encoded line end": (400, _line(b"POST /v1/completions?a=%0d%0aX:%20y HTTP/1.1")),
    "encoded DEL": (400, _line(b"POST /v1/completions%7F HTTP/1.1")),
    "method in lower case": (400, _line(b"post /v1/completions HTTP/1.1")),
    "method of one's own": (400, _line(b"FETCH /v1/completions HTTP/1.1")),
    "no method": (400, _line(b"/v1/completions HTTP/1.1")),
    "CONNECT": (405, _line(b"CONNECT localhost:80 HTTP/1.1")),
    "CONNECT to a path": (405, _line(b"CONNECT /v1/completions HTTP/1.1")),
    "TRACE": (405, _line(b"TRACE /v1/completions HTTP/1.1")),
    "PROPFIND": (405, _line(b"PROPFIND /v1/completions HTTP/1.1")),
    "no version": (505, b"GET /v1/models\r\n\r\n"),
    "HTTP/0.9": (505, _line(b"POST /v1/completions HTTP/0.9")),
    "HTTP/2.0": (505, _line(b"POST /v1/completions HTTP/2.0")),
    "HTTP/1.2": (400, _line(b"POST /v1/completions HTTP/1.2")),
    "HTTP/1.10": (400, _line(b"POST /v1/completions HTTP/1.10")),
    "HTTP/1": (400, _line(b"POST /v1/completions HTTP/1")),
    "http/1.1": (400, _line(b"POST /v1/completions http/1.1")),
    "RTSP": (400, _line(b"POST /v1/completions RTSP/1.0")),
    "ICE": (400, _line(b"POST /v1/completions ICE/1.0")),
    "the preface of HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64))),
    "no HTTP at all": (400, b"EHLO localhost\r\n"),
    "JSON alone": (400, BODY),
}

SIZES = {
    "a long target": (414, _line(b"POST /v1/completions?" + b"a" * 9000 + b" HTTP/1.1")),
    "a target without an end": (414, b"POST /" + b"a" * 300_000),
    "a long field": (431, _field(b"X: " + b"a" * 40_000)),
    "a field without an end": (431, b"POST / HTTP/1.1\r\nX: " + b"a" * 400_000),
    "many long fields": (431, _field(b"\r\n".join(b"X: " + b"a" * 1000 for _ in range(60)))),
    "many fields": (431, _field(b"\r\n".join(b"X: a" for _ in range(120)))),
    "a large body": (413, message(HOST, b"Content-Length: %d" % (MAX_BODY + 1), body=BODY)),
    "a large body, promised alone": (413, message(HOST, b"Content-Length: 99999999999")),
    "a large body in one chunk": (413, chunked(b"%x\r\n" % (MAX_BODY + 1) + b" " * 70_000)),
    "a large body in chunks": (413, chunked(b"400\r\n" + b"\r\n400\r\n".join([b" " * 1024] * 80))),
    "much behind a body": (431, chunked(_SIZE + b"0\r\nX: " + b"a" * 700_000)),
    "a long extension": (431, chunked(b"3;a=" + b"a" * 700_000)),
}

# Whole in one read, whatever follows them.
SHORT = LENGTHS | CHUNKS | FIELDS | HOSTS | LINES
MALFORMED = SHORT | SIZES
