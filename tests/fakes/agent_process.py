"""A real agent as a process on free ports, for tests, the demo's checks and benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.leaks import made_for_us
from tests.polling import PATIENCE_SECONDS, poll_until
from tests.process_log import ProcessLog

FAST_WINDOWS = (
    "--worker-reap-timeout-seconds=30",
    "--worker-registration-grace-seconds=60",
    "--close-confirm-seconds=3",
    "--hint-confirm-seconds=5",
)
"""The smallest windows that the flags allow, near enough."""


class AgentProcess:
    """Starts `lmcache-nodeagent` (or `module`, for agents with fakes inside) and stops it.

    Its log goes to a file, so that a full pipe never stops it.
    """

    def __init__(
        self,
        *flags: str,
        module: str = "lmcache_nodeagent",
        l1_size_gb: float = 0.0625,
        port: int = 0,
        environ: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        self._command = [
            *wrapper,
            sys.executable,
            "-m",
            module,
            f"--port={port}",
            "--http-port=0",
            f"--l1-size-gb={l1_size_gb}",
            "--log-format=json",
            *flags,
        ]
        self._environ = {**os.environ, **(environ or {})}
        self._log = ProcessLog()
        self._process: subprocess.Popen[str] | None = None
        self._ready: dict[str, Any] = {}

    def start(self) -> Self:
        """Start and wait for the ready line."""
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=self._log.fileno(),
            text=True,
            env=self._environ,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(PATIENCE_SECONDS)
            raise AssertionError(f"the agent ended with {code}: {self.log_text()}")
        self._ready = json.loads(line)
        assert self._ready["event"] == "agent_ready"
        names = [flag.partition("=")[2] for flag in self._command if flag.startswith("--shm-name=")]
        made_for_us(f"lmcache-kube.l1.{[f'port-{self.port}', *names][-1]}")
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def process(self) -> subprocess.Popen[str]:
        """The running process."""
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        """The agent's own process id, which a wrapper's is not."""
        return int(self._ready["pid"])

    @property
    def port(self) -> int:
        """The message port."""
        return int(self._ready["port"])

    @property
    def http_port(self) -> int:
        """The HTTP port."""
        return int(self._ready["http_port"])

    @property
    def boot_id(self) -> str:
        """The id of this life of the agent."""
        return str(self._ready["boot_id"])

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"tcp://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:  # noqa: ANN401  # JSON
        """Return a JSON body; also that of an error reply."""
        url = f"http://127.0.0.1:{self.http_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def status(self) -> Any:  # noqa: ANN401  # JSON
        """Return `/status`."""
        return self.get("/status")

    def instances(self) -> dict[int, dict[str, Any]]:
        """Return `/v1/instances` by instance id."""
        return {
            int(entry["instance_id"]): entry for entry in self.get("/v1/instances")["instances"]
        }

    def reaps(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the reaps after `since`."""
        reaps: list[dict[str, Any]] = self.get(f"/v1/reaps?since={since}")["reaps"]
        return reaps

    def wait_reaped(self, instance_id: int) -> dict[str, Any]:
        """Wait for the journal entry of an instance."""
        return poll_until(
            lambda: next((r for r in self.reaps() if int(r["instance_id"]) == instance_id), None),
        )

    def metric(self, name: str, **labels: str) -> float:
        """Return one sample of `/metrics`, 0 if it is not there."""
        url = f"http://127.0.0.1:{self.http_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as reply:
            lines = reply.read().decode().splitlines()
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in lines:
            sample, _, value = line.rpartition(" ")
            base, _, rest = sample.partition("{")
            if (
                base == f"lmcache_kube_{name}"
                and wanted <= set(rest.rstrip("}").split(",")) | set()
            ):
                return float(value)
        return 0.0

    def log_text(self) -> str:
        """Return everything logged so far."""
        return self._log.text()

    def log_records(self, event: str) -> list[dict[str, Any]]:
        """Return the log records of one event name."""
        return self._log.records(event)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the agent itself."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.signal(signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)

    def stop(self) -> int:
        """SIGTERM, wait, return the exit status."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """End it if it still runs, and give everything back."""
        if self._process is not None:
            if self._process.poll() is None:
                try:
                    self.signal(signal.SIGCONT)
                    self.stop()
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
        self._log.close()


def shared_memory_files(directory: Path = Path("/dev/shm")) -> set[str]:
    """Return the names in /dev/shm that are ours."""
    return {
        entry.name
        for entry in directory.iterdir()
        if entry.name.startswith(("lmcache-kube.", "lmcache_kv_"))
    }
