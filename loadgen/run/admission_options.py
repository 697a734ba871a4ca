"""Settings of admission on a command line."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

from engine_patches.admission import read_admission
from engine_patches.admission.settings import AdmissionError, AdmissionSettings
from router.core.errors import ConfigError


def parse_admission(option: str, text: str) -> AdmissionSettings:
    """Parse a policy's name, or its settings in the plug-in's form, ``{"policy": …}``."""
    is_object = text.lstrip().startswith("{")
    return admission_settings(option, parse_object(option, text) if is_object else {"policy": text})


def admission_settings(option: str, mapping: Mapping[str, object]) -> AdmissionSettings:
    """Check settings."""
    try:
        return read_admission(mapping)
    except AdmissionError as error:
        raise ConfigError(f"{option}: {error}") from error


def parse_object(option: str, text: str) -> dict[str, object]:
    """Parse a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} is no JSON ({error}): {text!r}") from error
    if not isinstance(found, dict):
        raise ConfigError(f'{option} takes an object such as {{"headroom": 0.1}}, got {text!r}')
    return found


@contextmanager
def told_warnings() -> Iterator[None]:
    """Print the policies' warnings, each once and without its place in the code."""
    with warnings.catch_warnings():
        warnings.simplefilter("once", UserWarning)
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
        yield
