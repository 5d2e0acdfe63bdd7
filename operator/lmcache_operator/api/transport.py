"""The ways between the agents' pods and worker pods."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmcache_operator.api.fields import Scalar, flag


class DevicePlugin(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Lets a worker's container reach its agent by asking for a resource, and for nothing else."""

    mode: Annotated[
        Literal["Enabled", "Disabled"],
        Meta(
            description="Enabled: each agent offers the resource lmcache-kube.dev/<name of this "
            "object> to its node's kubelet. A container with 1 of it in resources.limits finds the "
            "agent at ipc:///run/lmcache-kube/agent.sock, at any Pod Security level of its "
            "namespace. The agents' pods run as root for that, with the capabilities CHOWN, "
            "DAC_OVERRIDE and FOWNER alone: the kubelet's folders are root's, and workers' memory "
            "is their users'. Their own namespace needs the level privileged. Disabled: workers "
            "connect over TCP or unixSocket, and agents have no rights."
        ),
    ] = "Enabled"
    slots: Annotated[
        int,
        flag(
            "device_plugin_slots",
            "Containers of each node that may have the resource at a time. Further pods wait, "
            "Pending, until one of them ends.",
        ),
    ] = 64
    shared_memory: Annotated[
        Scalar,
        Meta(
            description="Most KV memory, as a quantity (64Gi), that a container with the resource "
            "may have in its /dev/shm, which is then one that only its agent shares: more of it is "
            "refused when the engine registers, and told by an Event later. Nothing is taken in "
            "advance; what a worker writes there counts as its own memory. The agents' cache then "
            "lies in the node's /dev/shm too, which must have room for it: by default that is half "
            "of the node's memory. 0 leaves /dev/shm alone in both."
        ),
    ] = "64Gi"
    pre_start_wait_seconds: Annotated[
        int,
        flag(
            "prestart_wait_seconds",
            "How long the start of a container waits at most until the memory of what ran in its "
            "slot before is released, so that the new engine does not run out of memory. 0 does "
            "not wait.",
            low=0,
        ),
    ] = 20


class Transport(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """How the agents' pods reach the memory and the processes of worker pods."""

    device_plugin: DevicePlugin = DevicePlugin()
    memory_sharing: Annotated[
        Literal["None", "HostShm", "HostIPC"],
        Meta(
            description="For workers without the resource of devicePlugin. None: they send and get "
            "the bytes in messages, which costs several copies. HostShm: both pods mount the "
            "node's /dev/shm and share it. HostIPC: both pods use the node's IPC namespace, which "
            "CUDA needs without isolated IPC. HostShm and HostIPC need namespaces whose Pod "
            "Security level is privileged."
        ),
    ] = "None"
    unix_socket: Annotated[
        Literal["Disabled", "HostPath"],
        Meta(
            description="HostPath: workers may also connect over a Unix socket in a folder of the "
            "node that both pods mount; the end of their process is then proven at once. It needs "
            "namespaces whose Pod Security level is privileged, one user for both pods, and "
            "devicePlugin.mode Disabled, since that does the same with less."
        ),
    ] = "Disabled"
