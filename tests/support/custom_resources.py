"""Of custom resources, which the schemas of Kubernetes do not know, the fields that are used here.

They are written after the definitions that the controllers install.
"""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_TEXT = {"type": "string", "minLength": 1}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def _closed(needed: str = "", /, **properties: Schema) -> Schema:
    """An object without other fields; ``needed``: names of those that must be given."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": needed.split(),
        "properties": properties,
    }


def _many(item: Schema, most: int = 100) -> Schema:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


_METADATA = _closed("name", name=_TEXT, namespace=_TEXT, labels=_LABELS, annotations=_LABELS)
_SELECTOR = _closed("matchLabels", matchLabels=_LABELS)
# As in a Deployment, of which Kubernetes has the schema.
_POD: Schema = {"type": "object", "required": ["spec"]}


def _resource(spec: Schema) -> Schema:
    return _closed(
        "apiVersion kind metadata spec", apiVersion=_TEXT, kind=_TEXT, metadata=_METADATA, spec=spec
    )


_RULE = _closed(
    "expr", alert=_TEXT, record=_TEXT, expr=_TEXT, labels=_LABELS, annotations=_LABELS,
    **{"for": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}},
)  # fmt: skip

CUSTOM_RESOURCES: Mapping[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _resource(
        _closed(
            "selector podMetricsEndpoints",
            jobLabel=_TEXT,
            selector=_SELECTOR,
            podMetricsEndpoints=_many(
                _closed(
                    "",
                    port=_TEXT,
                    path={"type": "string", "pattern": "^/"},
                    interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
                    scheme=_one_of("http", "https"),
                    tlsConfig=_closed(insecureSkipVerify={"type": "boolean"}),
                )
            ),
        )
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _resource(
        _closed("groups", groups=_many(_closed("name rules", name=_TEXT, rules=_many(_RULE))))
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _resource(
        _closed(
            "scaleTargetRef triggers",
            scaleTargetRef=_closed("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
            pollingInterval=_COUNT,
            minReplicaCount=_COUNT,
            maxReplicaCount=_COUNT,
            advanced=_closed(
                horizontalPodAutoscalerConfig=_closed(behavior={"type": "object"}),
            ),
            triggers=_many(
                _closed(
                    "type metadata",
                    type=_one_of("prometheus"),
                    name=_TEXT,
                    metricType=_one_of("AverageValue", "Value"),
                    # KEDA reads texts alone.
                    metadata=_closed(
                        "serverAddress query threshold",
                        serverAddress=_TEXT,
                        query=_TEXT,
                        threshold=_TEXT,
                    ),
                )
            ),
        )
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): _resource(
        _closed(
            "selector targetPorts endpointPickerRef",
            selector=_SELECTOR,
            targetPorts=_many(_closed("number", number=_PORT), most=8),
            endpointPickerRef=_closed(
                "name port",
                name=_TEXT,
                port=_closed("number", number=_PORT),
                failureMode=_one_of("FailClose", "FailOpen"),
            ),
        )
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _resource(
        _closed(
            "leaderWorkerTemplate",
            replicas=_COUNT,
            startupPolicy=_one_of("LeaderCreated", "LeaderReady"),
            rolloutStrategy=_closed(
                "type",
                type=_one_of("RollingUpdate"),
                rollingUpdateConfiguration=_closed(maxUnavailable=_COUNT, maxSurge=_COUNT),
            ),
            leaderWorkerTemplate=_closed(
                "workerTemplate size",
                size={"type": "integer", "minimum": 1},
                restartPolicy=_one_of("RecreateGroupOnPodRestart", "None"),
                leaderTemplate=_POD,
                workerTemplate=_POD,
            ),
        )
    ),
}
