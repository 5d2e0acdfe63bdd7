"""Stock vLLM on the CPU, with stock LMCache as its KV connector, as a process group of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.conformance.stock_process import STOCK_PYTHON
from tests.polling import poll_until

BLOCK_TOKENS = 32
NEW_TOKENS = 12
START_SECONDS = 300.0
STOP_SECONDS = 40.0
REQUEST_SECONDS = 120.0

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, a ceiling: the block count below decides
    "TORCHDYNAMO_DISABLE": "1",  # or the first request compiles for 20 seconds
    "PYTHONHASHSEED": "0",
}
_TOKENS = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{[^}]*source="(\w+)"[^}]*\}\s+(\S+)$', re.MULTILINE
)

_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MAPPING = re.compile(rf"(\d+) +{_SHARED_MEMORY}/")


@dataclass(frozen=True)
class Answer:
    """One completion, and where vLLM says that its prompt's tokens came from."""

    text: str
    logprobs: tuple[float, ...]
    computed: int = 0
    loaded: int = 0

    def same_as(self, other: Answer, tolerance: float = 1e-4) -> bool:
        """Tell whether the text is equal and the log probabilities nearly so."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.text == other.text and all(abs(a - b) <= tolerance for a, b in pairs)


class VllmProcess:
    """Starts vLLM with connector settings and waits until it serves."""

    def __init__(self, model: Path, connector: Mapping[str, object], log: Path) -> None:
        self._port = _free_port()
        self._log = log
        self._inodes: set[int] = set()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command(model, connector),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        try:
            poll_until(self._serves, "vLLM serves", patience_seconds=START_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, prompt: str, salt: str | None = None) -> Answer:
        """Complete a prompt."""
        request = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            **({"cache_salt": salt} if salt else {}),
        }
        choice = json.loads(self._http("/v1/completions", request))["choices"][0]
        return Answer(choice["text"], tuple(choice["logprobs"]["token_logprobs"]))

    def ask_and_leave(self, prompt: str) -> None:
        """Begin to complete a prompt at length, and go away after the first token."""
        request = {"model": "tiny", "prompt": prompt, "max_tokens": 500, "ignore_eos": True}
        connection = HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_SECONDS)
        with contextlib.closing(connection):
            body = json.dumps({**request, "stream": True})
            connection.request(
                "POST", "/v1/completions", body, {"content-type": "application/json"}
            )
            connection.getresponse().read(1)

    def ask_counted(self, prompt: str, salt: str | None = None) -> Answer:
        """Complete a prompt while nothing else runs, and count its tokens by source."""
        before = self.tokens_by_source()
        answer = self.ask(prompt, salt)
        spent = {
            source: count - before.get(source, 0)
            for source, count in self.tokens_by_source().items()
        }
        return Answer(
            answer.text,
            answer.logprobs,
            spent.get("local_compute", 0),
            spent.get("external_kv_transfer", 0),
        )

    def tokens_by_source(self) -> dict[str, int]:
        """Return vLLM's own count of prompt tokens by where they came from."""
        found = _TOKENS.findall(self._http("/metrics"))
        return {source: int(float(count)) for source, count in found}

    def kill_group(self) -> float:
        """SIGKILL every process of it at once; return the monotonic time at which it did."""
        self._note_shared_memory()
        killed = time.monotonic()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_SECONDS)
        return killed

    def close(self) -> None:
        """End what still runs; remove the shared memory that killed processes left."""
        if self._process.poll() is None:
            self._note_shared_memory()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # killed below, with its group
                self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # all gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_SECONDS)
        for file in _SHARED_MEMORY.iterdir():
            if file.lstat().st_ino in self._inodes:
                file.unlink(missing_ok=True)

    def log_tail(self, lines: int = 40) -> str:
        """Return the end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _command(self, model: Path, connector: Mapping[str, object]) -> list[str]:
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(connector),
        }
        return [
            str(STOCK_PYTHON),
            *("-W", "ignore::DeprecationWarning"),
            # `vllm serve` looks for a distribution named vllm, and this one is vllm-cpu.
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", "tiny", "--dtype", "float32"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager"),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "1024"),
            "--no-enable-prefix-caching",  # what is found, the agent has
            *("--shutdown-timeout", "20"),  # by default a worker is killed before it unregisters
            *("--kv-transfer-config", json.dumps(transfer)),
        ]

    def _serves(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(f"vLLM ended at its start:\n{self.log_tail()}")
        try:
            self._http("/health")
        except OSError:
            return False
        self._note_shared_memory()
        return True

    def _http(self, path: str, body: object = None) -> str:
        request = urllib.request.Request(  # a loopback address of our own making
            f"http://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as reply:  # noqa: S310
            text: str = reply.read().decode()
        return text

    def _note_shared_memory(self) -> None:
        """Remember what its processes have mapped, by inode: semaphores are renamed."""
        leader = psutil.Process(self._process.pid)
        for process in (leader, *leader.children(recursive=True)):
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue  # ended meanwhile
            self._inodes.update(int(inode) for inode in _SHARED_MAPPING.findall(maps))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
