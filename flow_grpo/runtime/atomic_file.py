"""Files and folders that readers see complete or not at all: written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to `target` to make a file or a folder at; on an error it is removed.

    On success a file replaces `target`, and a folder takes the place of none or of an empty one. Missing parents are
    created. The temporary name is unique: of concurrent writers of a file, on any machine, the last one wins.

    Raises:
        OSError: `target` is a folder with content; of concurrent writers of a folder the first one wins.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{uuid.uuid4().hex}")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        with contextlib.suppress(OSError):  # must not hide the error of the writer
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink(missing_ok=True)


def write_atomically(file: Path, text: str) -> None:
    """Create or replace a UTF-8 text file, line ends unchanged. Raises OSError."""
    with atomic_path(file) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
