"""A real operator as a process against the test's control plane."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.polling import PATIENCE_SECONDS, poll_until
from tests.process_log import ProcessLog

_OWN_PORTS = (10_000, 32_000)


class OperatorProcess:
    """Starts `lmcache-operator` and ends it; with the same object it can be started again.

    By default it listens on loopback on free ports, tells agents that address, and takes a Lease of
    its own in `namespace`, which is also the one namespace that it serves. Its log goes to a file,
    so that a full pipe never stops it.
    """

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        *flags: str,
        every_namespace: bool = False,
    ) -> None:
        self.link_port = free_port()
        self._command = [
            sys.executable,
            "-m",
            "lmcache_operator",
            f"--operator-namespace={namespace}",
            *([] if every_namespace else [f"--namespace={namespace}"]),
            "--link-host=127.0.0.1",
            f"--link-port={self.link_port}",
            f"--link-url=wss://localhost:{self.link_port}",
            "--http-host=127.0.0.1",
            "--http-port=0",
            "--log-format=json",
            *flags,
        ]
        self._environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("LMCACHE_KUBE_")},
            "KUBECONFIG": str(kubeconfig),
        }
        self._log = ProcessLog()
        self._process: subprocess.Popen[bytes] | None = None
        self._starts_at = 0

    def launch(self) -> Self:
        """Start the process, and wait for nothing."""
        assert self._process is None or self._process.poll() is not None, "it runs"
        self._starts_at = len(self.log_text())
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stderr=self._log.fileno(), env=self._environ
        )
        return self

    def start(self) -> Self:
        """Start and wait until it acts: it holds the Lease."""
        self.launch()
        return self.wait_for_record("operator_acts")

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process, running or ended."""
        assert self._process is not None, "not started"
        return self._process

    @property
    def link_url(self) -> str:
        """Where agents are told to connect."""
        return f"wss://localhost:{self.link_port}"

    @property
    def http_port(self) -> int:
        """The port for HTTP of the running process."""
        return int(self.wait_for_record("http_listening").records("http_listening")[-1]["port"])

    def wait_for_record(self, event: str) -> Self:
        """Wait until the running process has logged an event; fail if it ends before."""

        def logged() -> bool:
            if self.records(event):
                return True
            code = self.process.poll()
            assert code is None, f"the operator ended with {code}: {self.log_text()}"
            return False

        poll_until(logged, lambda: f"the operator logs {event}: {self.log_text()}")
        return self

    def wait_ended(self) -> int:
        """Wait until it has ended by itself; return the exit status."""
        try:
            return self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs: {self.log_text()}") from None

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of an answer over HTTP."""
        url = f"http://127.0.0.1:{self.http_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Return one sample of `/metrics`, 0 if it is not there."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.get("/metrics")[1].splitlines():
            sample, _, value = line.rpartition(" ")
            base, _, rest = sample.partition("{")
            given = set(rest.rstrip("}").split(",")) if rest else set()
            if base == f"lmcache_kube_operator_{name}" and wanted <= given:
                return float(value)
        return 0.0

    def log_text(self) -> str:
        """Return everything logged so far, by all starts."""
        return self._log.text()

    def records(self, event: str) -> list[dict[str, Any]]:
        """Return the log records of one event name since the last start."""
        return self._log.records(event, self._starts_at)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)

    def stop(self) -> int:
        """SIGTERM, wait, return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """End it if it still runs, and give everything back."""
        if self._process is not None and self._process.poll() is None:
            try:
                self._process.send_signal(signal.SIGCONT)
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()


def free_port() -> int:
    """Return a port that is free, and stays so while its server is down for a moment.

    The system hands out higher ones to whoever connects somewhere.
    """
    while True:
        port = random.randrange(*_OWN_PORTS)  # noqa: S311  # nothing secret
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue  # somebody has it
