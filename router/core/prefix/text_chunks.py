"""Ids of a text prompt's leading parts, of its bytes alone: the router has no tokenizer.

A text is given in parts, each message one. They are cut into chunks, and a part's end is a chunk's
end too, so that a conversation's next turn has all chunks of the turn before. A chunk's id stands
for all bytes up to its end and for what else decides the prompt; that is the first chunk's id,
which has no bytes. Eight bytes each, in the machine's order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from router.core.prefix.ids import ID_BYTES
from router.core.types import Content

CHUNK_BYTES = 512
"""Bytes of a chunk; beyond 256 KiB of a part they grow with the distance from its start.

So media in a message cost little, and an end is still known within half a percent.
"""

PART_END = 1 << 31
"""In ``Content.sizes``: the chunk is the last one of its part."""


def seed(decides: Mapping[str, bytes]) -> bytes:
    """The first chunk's id: of named values that decide how the parts become a prompt."""
    told = b"".join(b"%b %d %b" % (name.encode(), len(v), v) for name, v in decides.items())
    return blake2b(told, digest_size=ID_BYTES).digest()


def text_content(seed_: bytes, parts: Iterable[bytes]) -> Content:
    """Ids of a prompt's chunks; empty parts are none."""
    ids, sizes = [seed_], [PART_END]
    parent = seed_
    for part in parts:
        start, left = 0, len(part)
        while left:
            size = CHUNK_BYTES if start < 1 << 18 else 1 << (start >> 8).bit_length() - 1
            chunk = part[start : start + size]
            parent = blake2b(parent + chunk, digest_size=ID_BYTES).digest()
            ids.append(parent)
            start, left = start + size, left - len(chunk)
            sizes.append(len(chunk) if left else len(chunk) | PART_END)
    return Content(chunks=b"".join(ids), sizes=array("I", sizes).tobytes())
