"""Helm in this process, and what Kubernetes accepts, for the chart and the manifests."""

import functools
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.support.custom_resources import CUSTOM_RESOURCES

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "evenstep"
EXAMPLES = sorted((CHART.parent / "examples").glob("*.yaml"))
RELEASE, NAMESPACE = "demo", "serving"

# Of each of them the newest patch counts.
KUBERNETES = tuple(f"1.{minor}" for minor in range(30, 38))

Document = dict[str, Any]

# They are read again for every document else, megabytes of definitions among them.
utils.schema_contents = functools.cache(utils.schema_contents)
utils.all_versions = functools.cache(utils.all_versions)


def helm() -> Any:
    """The package; without it the test is skipped, or fails in CI."""
    try:
        import helm_python
    except (ImportError, OSError) as error:
        missing = f"no Helm here (pip install helm-python-sdk): {error}"
        if os.environ.get("REQUIRE_HELM"):
            pytest.fail(missing)
        pytest.skip(missing)
    return helm_python


def values_of(path: Path) -> Document:
    values: Document = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def refusal(values: Mapping[str, Any]) -> str:
    """Why the chart refuses these values."""
    with pytest.raises(helm().HelmError) as refused:
        rendered(values)
    return str(refused.value)


def rendered(values: Mapping[str, Any]) -> list[Document]:
    """The objects of a release."""
    with helm().Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    return [
        document
        for name, text in files.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document is not None
    ]


def of_kind(documents: Sequence[Document], kind: str, name: str | None = None) -> list[Document]:
    return [
        each
        for each in documents
        if each["kind"] == kind and name in (None, each["metadata"]["name"])
    ]


def only(documents: Sequence[Document], kind: str, name: str | None = None) -> Document:
    (found,) = of_kind(documents, kind, name)
    return found


def config_of(documents: list[Document]) -> dict[str, Any]:
    """The settings that a release gives the router."""
    name = only(documents, "Deployment")["metadata"]["name"]
    return tomllib.loads(only(documents, "ConfigMap", name)["data"]["evenstep.toml"])


def complaints(document: Document, version: str) -> Iterator[str]:
    """What a cluster of this version would refuse in it.

    The schemas of Kubernetes do not know custom resources: those have the tests' own.
    """
    schema = CUSTOM_RESOURCES.get((document["apiVersion"], document["kind"]))
    try:
        if schema is None:
            kubernetes_validate.validate(document, version, strict=True)
        else:
            jsonschema.validate(document, schema)
    except (jsonschema.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        name, where = document["metadata"]["name"], list(getattr(error, "absolute_path", ()))
        yield f"{document['kind']} {name} in {version}, at {where}: {error.message}"
