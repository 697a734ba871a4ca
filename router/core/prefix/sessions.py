"""Ids of clients' sessions, for prompts that are not visible."""

from hashlib import blake2b

from router.core.prefix.ids import ID_BYTES
from router.core.types import Content

MOST_NAME_BYTES = 256
"""Longer names of sessions are ignored."""


def session_content(tenant: str, name: bytes, *apart: bytes) -> Content | None:
    """Content of a prompt that is not visible, in a session; ``apart``: what else divides caches.

    The name is the client's, and a tenant's own.
    """
    if not 0 < len(name) <= MOST_NAME_BYTES:
        return None
    told = b"".join(b"%d %b" % (len(each), each) for each in (tenant.encode(), name, *apart))
    return Content(session=blake2b(told, digest_size=ID_BYTES).digest())
