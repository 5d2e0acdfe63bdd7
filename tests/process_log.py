"""What a process of a test writes, in a file: a full pipe would stop it."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any


class ProcessLog:
    """Give its descriptor to `Popen` as stdout or stderr; it can be read at any time.

    Both share the position in the file, so that reading must not move it: the process would write
    over what it wrote before. A mode of "a" does not help, since temporary files are opened
    without it.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()

    def fileno(self) -> int:
        """The descriptor that the process inherits."""
        return self._file.fileno()

    def text(self) -> str:
        """Return everything written so far."""
        parts, position = [], 0
        while part := os.pread(self.fileno(), 1 << 20, position):
            parts.append(part)
            position += len(part)
        return b"".join(parts).decode(errors="replace")

    def records(self, event: str = "", starts_at: int = 0) -> list[dict[str, Any]]:
        """Return the whole lines of JSON, of one event name if given, from a position of the text.

        The last line may be half written.
        """
        whole = self.text()[starts_at:].rpartition("\n")[0]
        found = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        return [record for record in found if not event or record["event"] == event]

    def close(self) -> None:
        """Forget it."""
        self._file.close()
