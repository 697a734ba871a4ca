"""``evenstep keygen``: keys for state streams that leave the machine."""

from pathlib import Path
from typing import Annotated

import typer

from router.commands.json_output import STDOUT, json_option, write_json
from router.commands.options import flag
from router.core.errors import InputError
from router.engines.curve_keys import read_key_pair, write_key_pair


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="file of the key pair")],
    public_only: Annotated[
        bool, flag("print the public key of an existing FILE; make none", name="--public")
    ] = False,
    json_file: Annotated[str | None, json_option("write the public key; - is stdout")] = None,
) -> None:
    """Make a CURVE key pair in a file that only its owner can read, and print the public key.

    In an engine's configuration, secret_key_file is its file and allowed_keys has the router's
    public key. For the router, --secret-key-file is its file, and server_key= of each worker is the
    engine's public key.
    """
    if str(file) == json_file:
        raise InputError(f"--json {json_file} is the file of the key pair; name another")
    public = read_key_pair(str(file)).public.decode() if public_only else write_key_pair(file)
    if json_file != STDOUT:
        typer.echo(public)
    write_json({"file": str(file), "public_key": public}, json_file)
