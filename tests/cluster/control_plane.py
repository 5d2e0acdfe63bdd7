"""A Kubernetes control plane: etcd, API server and the controllers that tests need.

By itself it has no nodes: pods are objects, and a test writes their status as a kubelet would.
Given a network of nodes it also schedules pods, and judges the nodes that join.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster.api import Api
from tests.cluster.certificates import Authority, KeyPair
from tests.cluster.program_flags import (
    NodeNetwork,
    api_flags,
    controller_flags,
    etcd_flags,
    scheduler_flags,
)
from tests.polling import poll_until

CONTEXT = "lmcache-kube-test"

_STOP_SECONDS = 5.0
_ATTEMPTS = 3  # a free port may be taken by somebody else before it is bound


class ProgramEnded(Exception):
    """A program of the control plane ended while it started."""


class ControlPlane:
    """One control plane on free ports; everything it writes is in `folder`.

    With `outlives`, its processes go on when this process ends; otherwise they end with it, however
    it ends. Without `network`, nothing judges or schedules onto nodes.
    """

    def __init__(
        self,
        folder: Path,
        programs: Path,
        *,
        outlives: bool = False,
        network: NodeNetwork | None = None,
    ) -> None:
        self.folder = folder
        self.programs = programs
        self.kubeconfig = folder / "admin.kubeconfig"
        self._network = network
        self._outlives = outlives
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._authority: Authority | None = None
        self._api: Api | None = None

    @property
    def api(self) -> Api:
        """The API server, as the administrator."""
        assert self._api is not None, "not started"
        return self._api

    @property
    def authority(self) -> Authority:
        """What signs for this control plane."""
        assert self._authority is not None, "not started"
        return self._authority

    def start(self) -> Self:
        """Start everything and wait until it serves.

        Raises:
            ProgramEnded: a program ended; the message has the end of its log.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._authority = Authority(self.folder / "pki")
        for attempt in range(_ATTEMPTS):
            try:
                self._start_servers(self._authority)
                break
            except ProgramEnded as error:
                self.stop()
                if attempt == _ATTEMPTS - 1 or "address already in use" not in str(error):
                    raise
        return self

    def stop(self) -> None:
        """End everything; the API server first, so that it does not wait for etcd."""
        for process in reversed(self._processes.values()):
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()  # etcd without its API server lingers
                process.wait()
        self._processes.clear()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def kubectl(
        self, *arguments: str, given: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator, with `given` as its standard input."""
        return subprocess.run(
            [self.programs / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments],
            input=given,
            text=True,
            capture_output=True,
            check=False,
            env={**os.environ, "HOME": str(self.folder)},  # its discovery cache
        )

    def user_kubeconfig(self, file_name: str, user: str, group: str = "") -> Path:
        """Make credentials for a user, as a kubeconfig."""
        pair = self.authority.issue(file_name, user, group=group)
        path = self.folder / f"{file_name}.kubeconfig"
        self._write_kubeconfig(path, self.api.port, pair)
        return path

    def start_program(self, name: str, program: str | Path, *flags: str) -> None:
        """Start one more program; it ends with the others. Its log is `<name>.log`."""
        command = [str(program), *flags]
        if not self._outlives and (setpriv := shutil.which("setpriv")):
            command = [setpriv, "--pdeathsig", "KILL", *command]
        self._run(name, command)

    def crash(self, name: str) -> None:
        """Kill a program and start it as it was; it does not serve yet."""
        process = self._processes[name]
        process.kill()
        process.wait()
        assert isinstance(process.args, list), "as it was started"
        self._run(name, process.args)

    def _run(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is pytest's alone
            )

    def wait(self, what: str, serves: Callable[[], bool]) -> None:
        """Wait until a program serves.

        Raises:
            ProgramEnded: a program ended; the message has the end of its log.
        """

        def settled() -> bool:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    text = (self.folder / f"{name}.log").read_text(errors="replace")
                    raise ProgramEnded(f"{name} ended with {process.returncode}: {text[-2000:]}")
            return serves()

        poll_until(settled, f"{what} serves; logs are in {self.folder}")

    def processes(self) -> dict[str, int]:
        """Return the process id of each program."""
        return {name: process.pid for name, process in self._processes.items()}

    def _start_servers(self, authority: Authority) -> None:
        etcd_port, api_port = _free_ports(2)
        network = self._network
        self._start("etcd", *etcd_flags(self.folder / "etcd", etcd_port))
        self._start("kube-apiserver", *api_flags(authority, network, etcd_port, api_port))
        admin = authority.issue("admin", "admin", group="system:masters")
        self._api = Api(api_port, str(authority.certificate), admin)
        self._write_kubeconfig(self.kubeconfig, api_port, admin)
        self.wait("the API server", lambda: self._succeeds("/readyz"))
        controllers = self.user_kubeconfig("controllers", "system:kube-controller-manager")
        flags = controller_flags(authority, network, controllers)
        self._start("kube-controller-manager", *flags)
        if network:
            scheduler = self.user_kubeconfig("scheduler", "system:kube-scheduler")
            self._start("kube-scheduler", *scheduler_flags(scheduler))
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self.wait("the controllers", lambda: self._succeeds(account))

    def _start(self, name: str, *flags: str) -> None:
        self.start_program(name, self.programs / name, *flags)

    def _succeeds(self, path: str) -> bool:
        try:
            return self.api.request("GET", path).ok
        except OSError:
            return False  # does not listen yet

    def _write_kubeconfig(self, path: Path, port: int, user: KeyPair) -> None:
        cluster = {
            "server": f"https://127.0.0.1:{port}",
            "certificate-authority": str(self.authority.certificate),
        }
        who = {"client-certificate": str(user.certificate), "client-key": str(user.key)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": CONTEXT,
            "clusters": [{"name": CONTEXT, "cluster": cluster}],
            "users": [{"name": CONTEXT, "user": who}],
            "contexts": [{"name": CONTEXT, "context": {"cluster": CONTEXT, "user": CONTEXT}}],
        }
        path.write_text(json.dumps(content))  # JSON is YAML


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now; held together, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [opened.getsockname()[1] for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()
