"""Specs about the agent process and its pods, and specs as a whole."""

from __future__ import annotations

from tests.cluster.specs.row import (
    Judge,
    Row,
    agent,
    at_least,
    at_most,
    reader,
    server,
    spec_of,
    yes,
)


def plugin(**fields: object) -> dict[str, object]:
    """Make the part of a spec about the device plugin."""
    return {"devicePlugin": fields}


WHOLE = (
    Row("nothing but a size", {"cache": {"size": "20Gi"}}),
    Row("no size", {"cache": {}}, "spec.cache.size: Required value", Judge.READER),
    Row("no cache", {}, "spec.cache: Required value", Judge.READER),
    reader("unknown field", 'unknown field "spec.reaper"', reaper={"mode": "Enforce"}),
    reader("field one level off", 'unknown field "spec.chunkSize"', chunkSize=256),
    reader(
        "misspelled field", 'unknown field "spec.reaping.reapTimeout"', reaping={"reapTimeout": 9}
    ),
    yes("every part empty", reaping={}, server={}, workers={}, image={}, transport={}, gpu={}),
    Row("name with 40 characters", spec_of(), name="a" * 40),
    Row("name with 41 characters", spec_of(), "may not be more than 40 bytes", name="a" * 41),
    Row("name with a dot", spec_of(), "metadata.name in body should match", name="a.b"),
    Row("name with a digit first", spec_of(), "metadata.name in body should match", name="1kv"),
)

SERVER = (
    yes("other ports", server={"port": 6000, "httpPort": 6001}),
    agent(
        "one port for both",
        "httpPort is 8080, but must differ from port (8080): give one of them another number",
        server={"port": 8080},
    ),
    server("port 0, which a Service cannot have", at_least("server.port", 1), server={"port": 0}),
    agent("port 65536", at_most("server.port", 65535), server={"port": 65536}),
    agent("HTTP port 65536", at_most("server.httpPort", 65535), server={"httpPort": 65536}),
    reader("port as text", 'must be of type integer: "string"', server={"port": "5555"}),
    yes("chunk of one token", server={"chunkSize": 1}),
    agent("chunk of no token", at_least("server.chunkSize", 1), server={"chunkSize": 0}),
    agent("huge chunk", at_most("server.chunkSize", 1 << 20), server={"chunkSize": (1 << 20) + 1}),
    yes("threads", server={"maxCPUWorkers": 4, "maxGPUWorkers": 256}),
    agent("no thread", at_least("server.maxCPUWorkers", 1), server={"maxCPUWorkers": 0}),
    agent("257 threads", at_most("server.maxGPUWorkers", 256), server={"maxGPUWorkers": 257}),
    yes("debug log", server={"logLevel": "debug"}),
    reader("log level in capitals", "supported values", server={"logLevel": "INFO"}),
    yes("argument without a field", server={"extraArgs": ["--session-ttl-seconds=60"]}),
    server(
        "argument that has a field",
        '"--port=1" sets a flag that the operator sets itself: remove it and use spec.server.port',
        server={"extraArgs": ["--port=1"]},
    ),
    server(
        "argument in two words that has a field",
        '"--reap-mode" sets a flag that the operator sets itself: remove it and use '
        "spec.reaping.mode",
        server={"extraArgs": ["--session-ttl-seconds=60", "--reap-mode", "observe"]},
    ),
    server(
        "switch turned off that has a field",
        "remove it and use spec.reaping.reapIdleConnected",
        server={"extraArgs": ["--no-reap-idle-connected"]},
    ),
    reader("empty argument", "should be at least 1 chars long", server={"extraArgs": [""]}),
    reader("65 arguments", "must have at most 64 items", server={"extraArgs": ["--x"] * 65}),
    yes(
        "transport",
        transport={
            "memorySharing": "HostShm",
            "unixSocket": "HostPath",
            "devicePlugin": {"mode": "Disabled"},
        },
    ),
    server(
        "a socket on a host path beside the device plugin's",
        "unixSocket is HostPath, but must be Disabled while devicePlugin.mode is Enabled",
        transport={"unixSocket": "HostPath"},
    ),
    reader("unknown sharing", "supported values", transport={"memorySharing": "HostMem"}),
    yes("GPUs", gpu={"vendor": "NVIDIA"}),
    reader("unknown vendor", "supported values", gpu={"vendor": "AMD"}),
)

_MEMORY = "must be a quantity of bytes: write 64Gi, 500M or a plain number"

PLUGIN = (
    yes("device plugin off", transport={"devicePlugin": {"mode": "Disabled"}}),
    yes(
        "device plugin with everything",
        transport={
            "devicePlugin": {
                "mode": "Enabled",
                "slots": 1024,
                "sharedMemory": "8Gi",
                "preStartWaitSeconds": 25,
            }
        },
    ),
    yes("a single slot that never waits", transport=plugin(slots=1, preStartWaitSeconds=0)),
    reader("unknown mode", "supported values", transport=plugin(mode="On")),
    agent("no slot", at_least("transport.devicePlugin.slots", 1), transport=plugin(slots=0)),
    agent(
        "1025 slots",
        at_most("transport.devicePlugin.slots", 1024),
        transport=plugin(slots=1025),
    ),
    agent(
        "a wait that the kubelet would not have",
        at_most("transport.devicePlugin.preStartWaitSeconds", 25),
        transport=plugin(preStartWaitSeconds=26),
    ),
    agent(
        "a wait below zero",
        at_least("transport.devicePlugin.preStartWaitSeconds", 0),
        transport=plugin(preStartWaitSeconds=-1),
    ),
    *(
        yes(f"shared memory of {size!r}", transport=plugin(sharedMemory=size))
        for size in (0, "0", "0Gi", "0e3", "1Mi", "1048576", 1048576, "1.5Gi", "1Pi")
    ),
    *(
        Row(
            f"shared memory of {size!r}",
            spec_of(transport=plugin(sharedMemory=size)),
            f'sharedMemory is "{size}", but {_MEMORY}',
            Judge.AGENT,
        )
        for size in ("4GB", "lots", "")
    ),
    *(
        Row(
            f"shared memory of {size!r}",
            spec_of(transport=plugin(sharedMemory=size)),
            f"sharedMemory is {size}, but must be 0 (off) or 1Mi or more: raise it to 1Mi",
            Judge.AGENT,
        )
        for size in (1, "1Ki", -1, "1048575")
    ),
    Row(
        "shared memory of '2Pi'",
        spec_of(transport=plugin(sharedMemory="2Pi")),
        "sharedMemory is 2Pi, but must be 1048576Gi or less: lower it",
        Judge.AGENT,
    ),
)

PODS = (
    yes("selector", workers={"podSelector": {"matchLabels": {"app": "vllm"}}, "annotate": False}),
    yes(
        "selector by expression",
        workers={
            "podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["a"]}]}
        },
    ),
    server(
        "empty selector",
        "podSelector is empty and would take every pod",
        workers={"podSelector": {}},
    ),
    server(
        "expression without values",
        "In and NotIn need values",
        workers={"podSelector": {"matchExpressions": [{"key": "app", "operator": "In"}]}},
    ),
    yes("namespaces", workers={"namespaces": ["one", "two"], "containerName": "engine"}),
    server("namespace twice", "Duplicate value", workers={"namespaces": ["one", "one"]}),
    reader("impossible namespace", "should match", workers={"namespaces": ["One"]}),
    yes(
        "image",
        image={"repository": "registry.example/a", "tag": "v1", "digest": "sha256:" + "0" * 64},
        imagePullSecrets=[{"name": "registry"}],
    ),
    reader(
        "digest without a hash's name",
        "spec.image.digest in body should match",
        image={"digest": "0" * 64},
    ),
    reader("tag with a space", "spec.image.tag in body should match", image={"tag": "a b"}),
    yes(
        "rolling update by per cent",
        updateStrategy={"type": "RollingUpdate", "maxUnavailable": "10%"},
    ),
    server(
        "rolling update of nobody",
        "maxUnavailable is 0, but must be a number of 1 or more, or 1% to 100%",
        updateStrategy={"maxUnavailable": 0},
    ),
    server(
        "rolling update of 101%",
        "maxUnavailable is 101%, but must be a number of 1 or more, or 1% to 100%",
        updateStrategy={"maxUnavailable": "101%"},
    ),
    reader("user below zero", at_least("security.runAsUser", 0), security={"runAsUser": -1}),
    server(
        "flag as a variable",
        "LMCACHE_KUBE_PORT is a flag of the agent: use the fields of this spec",
        env=[{"name": "LMCACHE_KUBE_PORT", "value": "1"}],
    ),
    server("variable twice", "Duplicate value", env=[{"name": "A"}, {"name": "A"}]),
    server(
        "variable with two values",
        "value and valueFrom exclude each other",
        env=[
            {"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
        ],
    ),
    reader(
        "no time to stop",
        at_least("terminationGracePeriodSeconds", 5),
        terminationGracePeriodSeconds=0,
    ),
    server("volume without a name", "Required value", volumes=[{"emptyDir": {}}]),
    reader(
        "toleration of an unknown effect", "supported values", tolerations=[{"effect": "Never"}]
    ),
    yes(
        "everything a pod may have",
        nodeSelector={"gpu": "yes"},
        affinity={
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}
            }
        },
        tolerations=[{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        priorityClassName="system-node-critical",
        runtimeClassName="nvidia",
        resources={"limits": {"cpu": "4"}},
        podLabels={"team": "a"},
        podAnnotations={"note": "b"},
        env=[{"name": "TZ", "value": "UTC"}],
        volumes=[{"name": "scratch", "emptyDir": {}}],
        volumeMounts=[{"name": "scratch", "mountPath": "/scratch"}],
        terminationGracePeriodSeconds=60,
    ),
)
