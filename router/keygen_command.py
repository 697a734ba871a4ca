"""``evenstep keygen``: keys for state streams that leave the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from router.engines.curve import write_key_pair
from router.errors import ConfigError

KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="where the key pair is written")]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="write the public key; - is stdout")
]


def keygen(file: KeyFile, json_file: JsonFile = None) -> None:
    """Make a CURVE key pair in a file that only its owner can read, and print the public key.

    An engine names its file as secret_key_file and the router's public key in allowed_keys; the
    router names its own by --secret-key-file and each engine's public key as server_key.
    """
    if json_file is not None and json_file != "-":
        _write(Path(json_file), "", "a")  # before there are keys, which it would leave behind
    public = write_key_pair(file)
    if json_file != "-":
        typer.echo(public)
    said = json.dumps({"file": str(file), "public_key": public})
    if json_file == "-":
        typer.echo(said)
    elif json_file is not None:
        _write(Path(json_file), said + "\n", "w")


def _write(path: Path, text: str, mode: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
