"""The shared-memory pool among real processes: owners that are killed, readers that leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from lmcache_nodeagent.errors import ConfigError
from lmcache_nodeagent.storage.pool import NAME_PREFIX, SHM_DIRECTORY, SharedPool

SIZE = 64 << 20
EXIT_SECONDS = 20

OWNER = """
import sys
from lmcache_nodeagent.storage.pool import SharedPool
pool = SharedPool.create(sys.argv[1], int(sys.argv[2]))
pool.buffer[:4] = b"mine"
print("ready", flush=True)
sys.stdin.read()
pool.close()
"""

READER = """
import mmap, os, sys
descriptor = os.open("/dev/shm/" + sys.argv[1], os.O_RDWR)
region = mmap.mmap(descriptor, 0)
os.close(descriptor)
print(region[:4].decode(), flush=True)
sys.stdin.read()
region[4:8] = b"read"
region.close()
"""

TOO_SMALL = """
import sys
from lmcache_nodeagent.errors import CapacityError
from lmcache_nodeagent.storage.pool import SharedPool
wanted = int(sys.argv[1])
try:
    SharedPool.create("small", wanted)
except CapacityError as error:
    print(error)
pool = SharedPool.create("small", wanted // 2)
pool.buffer[:] = bytes(wanted // 2)
pool.close()
print("all pages written")
"""


@pytest.fixture
def names() -> Iterator[tuple[str, str]]:
    """Make two names that nobody else uses; nothing of them is left afterwards."""
    pair = (f"test-{uuid4().hex}", f"test-{uuid4().hex}")
    yield pair
    left = [path_of(name) for name in pair if path_of(name).exists()]
    for path in left:
        path.unlink()
    assert not left


def path_of(name: str) -> Path:
    """Return where a pool of this name lies."""
    return SHM_DIRECTORY / f"{NAME_PREFIX}{name}"


@contextmanager
def program(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program in a process of its own; it ends with this block at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    """Wait for what the program says first."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end_input(process: subprocess.Popen[str]) -> int:
    """Let the program end in its own way; return its exit status."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(EXIT_SECONDS)


def test_an_owner_that_ends_leaves_nothing(names: tuple[str, str]) -> None:
    """A clean end removes the segment."""
    with program(OWNER, names[0], str(SIZE)) as owner:
        assert first_line(owner) == "ready"
        assert path_of(names[0]).exists()
        assert end_input(owner) == 0
    assert not path_of(names[0]).exists()


def test_a_killed_owner_s_left_over_goes_at_the_next_start(names: tuple[str, str]) -> None:
    """SIGKILL leaves the segment; the next start of that name has a new one, all zeros."""
    with program(OWNER, names[0], str(SIZE)) as owner:
        assert first_line(owner) == "ready"
        owner.send_signal(signal.SIGKILL)
        owner.wait(EXIT_SECONDS)
    left_over = path_of(names[0]).stat()
    assert left_over.st_size == SIZE
    pool = SharedPool.create(names[0], SIZE)
    assert not os.path.samestat(left_over, path_of(names[0]).stat())
    assert bytes(pool.buffer[:4]) == bytes(4)
    pool.close()


def test_a_living_owner_in_another_process_keeps_its_segment(names: tuple[str, str]) -> None:
    """A second start fails with the name; the owner's memory stays as it was."""
    with program(OWNER, names[0], str(SIZE)) as owner:
        assert first_line(owner) == "ready"
        before = path_of(names[0]).stat()
        with pytest.raises(ConfigError, match=names[0]):
            SharedPool.create(names[0], SIZE)
        assert os.path.samestat(before, path_of(names[0]).stat())
        assert path_of(names[0]).read_bytes()[:4] == b"mine"
        assert end_input(owner) == 0


def test_two_names_live_side_by_side(names: tuple[str, str]) -> None:
    """One owner killed and started again never touches the other one's segment."""
    mine, other = names
    with ExitStack() as stack:
        survivor = stack.enter_context(program(OWNER, other, str(SIZE)))
        victim = stack.enter_context(program(OWNER, mine, str(SIZE)))
        assert first_line(survivor) == first_line(victim) == "ready"
        victim.kill()
        victim.wait(EXIT_SECONDS)
        before = path_of(other).stat()
        with program(OWNER, mine, str(SIZE)) as successor:
            assert first_line(successor) == "ready"
            assert end_input(successor) == 0
        assert os.path.samestat(before, path_of(other).stat())
        assert end_input(survivor) == 0


def test_a_dead_owner_s_left_over_goes_at_any_start(names: tuple[str, str]) -> None:
    """A start clears away what dead agents of other names left: nobody else would."""
    mine, other = names
    with program(OWNER, other, str(SIZE)) as owner:
        assert first_line(owner) == "ready"
        owner.kill()
    assert path_of(other).exists()
    SharedPool.create(mine, SIZE).close()
    assert not path_of(other).exists()


@pytest.mark.parametrize("killed", [False, True])
def test_a_reader_s_exit_leaves_the_segment(names: tuple[str, str], *, killed: bool) -> None:
    """A reader that ends, one way or the other, takes nothing with it."""
    pool = SharedPool.create(names[0], SIZE)
    pool.buffer[:4] = b"mine"
    with program(READER, pool.name) as reader:
        assert first_line(reader) == "mine"
        if killed:
            reader.kill()
            reader.wait(EXIT_SECONDS)
        else:
            assert end_input(reader) == 0
            assert bytes(pool.buffer[4:8]) == b"read"
    assert path_of(names[0]).stat().st_nlink == 1
    with program(READER, pool.name) as second:
        assert first_line(second) == "mine"
    pool.close()


def test_too_small_a_file_system_is_refused_and_never_faults(tmp_path: Path) -> None:
    """In a namespace whose /dev/shm has 8 MiB: 16 MiB are refused with both figures, 8 work."""
    script = tmp_path / "program.py"
    script.write_text(TOO_SMALL)
    mount = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$0" "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, sys.executable, str(script), str(16 << 20)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=EXIT_SECONDS, check=False)
    if "unshare" in run.stderr or "mount:" in run.stderr:
        pytest.skip(f"needs the right to mount in a private namespace: {run.stderr.strip()}")
    assert run.returncode == 0, run.stderr
    refusal, written = run.stdout.splitlines()
    assert f"L1 of {16 << 20} bytes" in refusal
    assert f"free space of /dev/shm leaves {8 << 20} bytes" in refusal
    assert written == "all pages written"
