"""Files that readers see complete or not at all: written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_path(file: Path) -> Iterator[Path]:
    """Yield a temporary path next to `file` to write to; on success it replaces `file`, on an error it is removed.

    Missing folders are created. The temporary name is unique: of concurrent writers, on any machine, the last one wins.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp-{uuid.uuid4().hex}")
    try:
        yield temporary
        temporary.replace(file)
    finally:
        with contextlib.suppress(OSError):  # must not hide the error of the writer
            temporary.unlink(missing_ok=True)


def write_atomically(file: Path, text: str) -> None:
    """Create or replace a UTF-8 text file, line ends unchanged. Raises OSError."""
    with atomic_path(file) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
