"""Files and folders that readers see complete or not at all: written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import errno
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
    with temporary_path(target) as temporary:
        yield temporary
        temporary.replace(target)


@contextlib.contextmanager
def temporary_path(target: Path) -> Iterator[Path]:
    """Yield a unique path next to `target`, as `atomic_path` does; what is still there afterwards is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{uuid.uuid4().hex}")
    try:
        with naming(target):
            yield temporary
    finally:
        with contextlib.suppress(OSError):  # must not hide the error of the writer
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Let the error of a full disk name `file`, which is written inside, and the way out; others pass through."""
    try:
        yield
    except Exception as error:
        # A failed write names no file, and safetensors raises an error of its own.
        full = getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT) or "(os error 28)" in str(error)
        if full and not getattr(error, "filename", None):
            text = "No space left on device; free some there, or set output_root to another disk"
            raise OSError(errno.ENOSPC, text, str(file)) from None
        raise


def replace_folder(made: Path, target: Path) -> None:
    """Give a folder the name of another, which is removed: a reader finds the old, for a moment none, then the new one.

    Raises:
        OSError: `target` is a file, or one of the two cannot be renamed; both are as they were.
    """
    with temporary_path(target) as aside:
        existed = target.is_dir()
        if existed:
            target.rename(aside)
        try:
            made.rename(target)
        except OSError:
            if existed:
                aside.rename(target)
            raise


def write_atomically(file: Path, text: str) -> None:
    """Create or replace a UTF-8 text file, line ends unchanged. Raises OSError."""
    with atomic_path(file) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
