"""``evenstep keygen``: keys for state streams that leave the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from router.commands.json_output import STDOUT, json_option, write_json
from router.core.errors import InputError
from router.engines.curve import read_key_pair, write_key_pair

KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="where the key pair is, or will be")]
Public = Annotated[
    bool, typer.Option("--public", help="make nothing: print the public key that FILE has")
]
JsonFile = Annotated[str | None, json_option("write the public key; - is stdout")]


def keygen(file: KeyFile, public_only: Public = False, json_file: JsonFile = None) -> None:
    """Make a CURVE key pair in a file that only its owner can read, and print the public key.

    An engine names its file as secret_key_file and the router's public key in allowed_keys; the
    router names its own by --secret-key-file and each engine's public key as server_key.
    """
    if str(file) == json_file:
        raise InputError(f"--json {json_file} is where the key pair goes; name another file")
    public = read_key_pair(str(file)).public.decode() if public_only else write_key_pair(file)
    if json_file != STDOUT:
        typer.echo(public)
    write_json({"file": str(file), "public_key": public}, json_file)
