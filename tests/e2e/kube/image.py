"""Container images without a registry: a base from Debian, and the product's real Dockerfile on it.

Each is an archive in the cache, named after what it is made of, so that it is made once.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lmcache_operator.config import OperatorConfig
from tests.cluster.programs import cache_folder, one_build_at_a_time
from tests.e2e.kube.machine import BUSYBOX

PAUSE_IMAGE = "localhost/pause:1"
PRODUCT_IMAGE = str(OperatorConfig.__dataclass_fields__["agent_image"].default)
"""Under its released name, so that the manifests are applied as they are."""

_ROOT = Path(__file__).parents[3]
_SUITE = "bookworm"
_BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")
_CERTIFICATES = Path("/etc/ssl/certs")
_PIP_SETTINGS = ("cert", "extra-index-url", "index-url", "proxy", "timeout", "trusted-host")
_PAUSES_SECONDS = (10.0, 30.0)
_NETWORK = re.compile(
    r"connect|timed out|timeout|resol(ve|ution)|reset by peer|unreachable|incomplete|hash sum"
    r"|no matching distribution|retry|retrieving|fetch|download|release file"
    r"|bad gateway|unavailable|too many requests",
    re.IGNORECASE,
)
"""What pip, debootstrap and their libraries say of a network that does not work just now."""

_KEPT = 2  # of each image: this one, and the one before for whoever goes back

_PAUSE = """
FROM scratch
COPY busybox /busybox
ENTRYPOINT ["/busybox", "sleep", "2147483647"]
"""
_BASE = """
FROM scratch
ADD base.tar /
CMD ["/bin/sh"]
"""


class ImageFailed(Exception):
    """A step of making an image ended with an error; the message has its last words."""


def pause_archive() -> Path:
    """Return the image of the process that holds a pod's namespaces."""
    return _cached("pause", _digest([BUSYBOX.read_bytes(), _PAUSE.encode()]), _make_pause)


def product_archive() -> Path:
    """Return the image of the working tree, built from its Dockerfile."""
    return _cached("lmcache-kube", _digest(_product_contents()), _make_product)


def _cached(name: str, key: str, make: Callable[[Path], None]) -> Path:
    folder = cache_folder() / "images"
    archive = folder / f"{name}-{key}.tar"
    with one_build_at_a_time():
        if not archive.exists():
            print(f"making the image {name}", file=sys.stderr)
            began = time.monotonic()
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = archive.with_suffix(".unfinished")
            unfinished.unlink(missing_ok=True)
            make(unfinished)
            unfinished.rename(archive)
            print(f"made {archive} in {time.monotonic() - began:.0f} s", file=sys.stderr)
        archive.touch()
        made = sorted(folder.glob(f"{name}-*.tar"), key=lambda path: path.stat().st_mtime)
        for old in made[:-_KEPT]:
            old.unlink()
    return archive


def _make_pause(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        context = Path(made)
        shutil.copy(BUSYBOX, context / "busybox")
        (context / "Dockerfile").write_text(_PAUSE)
        _build(context, PAUSE_IMAGE)
    _save(PAUSE_IMAGE, archive)


def _make_product(archive: Path) -> None:
    base = _base_image()
    with tempfile.TemporaryDirectory() as made:
        settings = Path(made) / "pip.conf"
        settings.write_text(_pip_settings())
        shared = [f"{_CERTIFICATES}:{_CERTIFICATES}:ro", f"{settings}:/etc/pip.conf:ro"]
        volumes = [word for volume in shared for word in ("--volume", volume)]
        words = ["--build-arg", f"BASE_IMAGE={base}", *volumes]
        fetched(lambda: _build(_ROOT, PRODUCT_IMAGE, *words))
    _save(PRODUCT_IMAGE, archive)


def _base_image() -> str:
    """Return a stand-in for the Dockerfile's default base, made by debootstrap once."""
    image = f"localhost/python-base:{_base_key()}"
    names = _run(*_buildah("images", "--quiet", "--filter", f"reference={image}"))
    if names.strip():
        return image
    fetched(lambda: _make_base(image))
    return image


def _make_base(image: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        context = Path(made)
        root = context / "root"
        include = f"--include={','.join(_BASE_PACKAGES)}"
        _run("debootstrap", "--variant=minbase", include, _SUITE, str(root), *_mirror())
        left_out = ("./dev/*", "./var/cache/apt/*", "./var/lib/apt/lists/*")
        options = [f"--exclude={pattern}" for pattern in left_out]
        _run("tar", "--create", f"--file={context}/base.tar", *options, f"--directory={root}", ".")
        (context / "Dockerfile").write_text(_BASE)
        (context / ".dockerignore").write_text("root\n")
        _build(context, image)


def _mirror() -> list[str]:
    """Return where this machine's apt gets Debian's packages, none where that is not known."""
    if not shutil.which("apt-get"):
        return []
    wanted = ("--format", "$(ORIGIN) $(CODENAME) $(SITE)", "Created-By: Packages")
    for line in _run("apt-get", "indextargets", *wanted).splitlines():
        match line.split():
            case ["Debian", codename, site] if "-" not in codename:  # not its updates
                return [site]
    return []


def _base_key() -> str:
    return _digest([_SUITE.encode(), _BASE.encode(), *map(str.encode, _BASE_PACKAGES)])


def fetched(make: Callable[[], None], pauses_seconds: Sequence[float] = _PAUSES_SECONDS) -> None:
    """Make something of what comes from elsewhere, once more where that looks like the network.

    Raises:
        ImageFailed: it is something else, or lasts.
    """
    for pause in pauses_seconds:
        try:
            return make()
        except ImageFailed as error:
            if not _NETWORK.search(str(error)):
                raise
            print(f"{error}\nonce more in {pause:.0f} s", file=sys.stderr)
        time.sleep(pause)
    return make()


def _build(context: Path, image: str, *options: str) -> None:
    _run(*_buildah("rm", "--all"))  # what an interrupted build left
    # Everything else needs a user namespace or a mount that a machine may refuse.
    isolated = _buildah("bud", "--isolation", "chroot", "--tag", image)
    _run(*isolated, *options, str(context))


def _save(image: str, archive: Path) -> None:
    _run(*_buildah("push", "--quiet", image, f"docker-archive:{archive}:{image}"))
    _run(*_buildah("rmi", image))  # the archive is what is kept


def _buildah(command: str, *words: str) -> list[str]:
    """Name a command with a store of our own; the driver needs nothing of the file system."""
    store = cache_folder() / "buildah"
    places = ["--root", str(store / "store"), "--runroot", str(store / "run")]
    return ["buildah", "--storage-driver", "vfs", *places, command, *words]


def _pip_settings() -> str:
    """Return this machine's way to packages, as the build is to use it too."""
    known = {}
    for line in _run(sys.executable, "-m", "pip", "config", "list").splitlines():
        key, _, value = line.partition("=")
        name = re.sub(r"^(default-)?", "", key.rpartition(".")[2])
        if name in _PIP_SETTINGS:
            known[name] = ast.literal_eval(value)
    lines = (f"{name} = {value}" for name, value in sorted(known.items()))
    return "\n".join(["[global]", *lines, ""])


def _product_contents() -> Iterable[bytes]:
    """Yield everything the image is made of, names included."""
    yield _base_key().encode()
    allowed = (_ROOT / ".dockerignore").read_text().splitlines()
    sources = [_ROOT / line.removeprefix("!") for line in allowed if line.startswith("!")]
    files = {file for source in sources for file in (source, *source.glob("**/*"))}
    for file in sorted({_ROOT / "Dockerfile", *files}):
        if file.is_file() and "__pycache__" not in file.parts:
            yield str(file.relative_to(_ROOT)).encode()
            yield file.read_bytes()


def _digest(contents: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "big"))
        digest.update(content)
    return digest.hexdigest()[:12]


def _run(*command: str) -> str:
    """Run a step and return what it said.

    Raises:
        ImageFailed: it ended with an error.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise ImageFailed(f"`{' '.join(command)}` ended with {done.returncode}:\n{words}")
    return done.stdout
