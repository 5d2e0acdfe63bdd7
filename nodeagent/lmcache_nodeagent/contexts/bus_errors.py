"""Memory whose pages its owner takes away: whoever copies it then goes on, with zeros.

A worker may cut its file short at any moment, also in the middle of a copy; or punch a hole into it
that a full file system cannot fill. The kernel answers the next access with SIGBUS, which ends the
process, and files of /dev/shm cannot be sealed against it (seals are for memfds). So the signal is
handled where it can be told whose memory it was: what is left of the mapping becomes zeros, and is
marked as lost for the copy to find at its end.

A handler in Python is sound here, and only here: the signal comes from the very instruction that
copies, so the thread holds no lock of the allocator, and ctypes takes the GIL if the copy gave it
away. The disposition of a signal is one for the whole process, and so is the list of mappings.
"""

from __future__ import annotations

import ctypes
import mmap
import signal

_SA_SIGINFO = 4
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Python's mmap has no names for them
_ZEROS_IN_PLACE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
_MAP_FAILED = ctypes.c_void_p(-1).value


class _SignalInfo(ctypes.Structure):
    """The start of `siginfo_t` on 64 bits (sigaction(2)): `address` is where the access went."""

    _fields_ = (
        ("number", ctypes.c_int),
        ("errno", ctypes.c_int),
        ("code", ctypes.c_int),
        ("address", ctypes.c_void_p),
    )


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(_SignalInfo), ctypes.c_void_p)


class _Action(ctypes.Structure):
    """`struct sigaction` of glibc and musl on x86-64 and arm64."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


class WatchedMemory:
    """One mapping of somebody else's file. Threads: any.

    `is_lost` is set once a page of it was gone; what was copied since may be zeros.
    """

    def __init__(self, buffer: mmap.mmap) -> None:
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self._end = self._start + len(buffer)
        self.is_lost = False

    def take_over(self, address: int) -> bool:
        """Put zeros in place of the page at `address` and all behind it; False if not ours."""
        if not self._start <= address < self._end:
            return False
        self.is_lost = True
        first = address - address % mmap.PAGESIZE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        made = _libc.mmap(first, self._end - first, access, _ZEROS_IN_PLACE, -1, 0)
        return bool(made != _MAP_FAILED)


_watched: dict[int, WatchedMemory] = {}  # by id; no lock, as the handler could not take it
_previous = _Action()


def watch(buffer: mmap.mmap) -> WatchedMemory:
    """Survive the loss of a mapping's pages, until `forget`."""
    memory = WatchedMemory(buffer)
    _watched[id(memory)] = memory
    return memory


def forget(memory: WatchedMemory) -> None:
    """Watch no longer; before it is unmapped. Idempotent."""
    _watched.pop(id(memory), None)


def _bus_error(number: int, info: ctypes._Pointer[_SignalInfo], _context: int) -> None:
    """Take a page's place. What is not watched meets the disposition of before, on its return."""
    address = info.contents.address or 0
    if not any(memory.take_over(address) for memory in list(_watched.values())):
        _libc.sigaction(number, ctypes.byref(_previous), None)


_handle = _Handler(_bus_error)


def survive_bus_errors() -> None:
    """Handle SIGBUS from now on; a second time changes nothing. Call before there are threads."""
    action = _Action(ctypes.cast(_handle, ctypes.c_void_p), flags=_SA_SIGINFO)
    found = _Action()
    _libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(found))
    if found.handler != action.handler:
        ctypes.pointer(_previous)[0] = found
