"""An exclusive lock on a run's folder: two processes saving into one folder would destroy each other's checkpoints.

This happens by accident: after a launcher is killed its ranks may live on for a while, and the run is started again.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"  # holds "process <pid> on <host>"
_KERNEL_LOCKS = Path("/proc/locks")  # Linux: "1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF", a line a lock
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # from file systems without locks
_log = logging.getLogger(__name__)


class RunLock:
    """The lock of one run's folder; the system releases it when the process ends for whatever reason."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOCK
        # No soft lock: it would outlive a killed process.
        self._lock = FileLock(self._file, blocking=False, thread_local=False, fallback_to_soft=False)

    def take(self) -> None:
        """Create and lock the folder, unless this object has locked it already.

        Raises:
            ValueError: another process holds the lock, or the lock file is a symbolic link.
            OSError: the folder cannot be written to.
        """
        if self._lock.is_locked:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._file.is_symlink():
            raise ValueError(f"lock file {self._file} is a symbolic link, which is not followed; remove it")
        try:
            self._lock.acquire()
        except Timeout:
            holder = self._file.read_text(errors="replace")[:200] or "another process"
            raise ValueError(
                f"run folder {self._file.parent} is in use by {holder}; wait until that has ended, or pass another "
                "--config.run_name"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            _log.warning("%s cannot be locked (%s): see that no other run uses it", self._file.parent, error)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(self._file, flags, 0o644), "w") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}")

    def release(self) -> None:
        """Unlock the folder."""
        self._lock.release()


def is_held(folder: Path) -> bool | None:
    """Whether a process holds the lock of a run's folder, None where that cannot be seen from here.

    The kernel's list is read: even to try the lock would be to hold it for an instant, in which no run could start.
    Other machines' locks are not in that list, nor are those of a file system without locks.
    """
    file = folder / LOCK
    try:
        holder, locks = file.read_text(errors="replace").split(), _KERNEL_LOCKS.read_text()
        inode = file.stat().st_ino
    except OSError:
        return None
    if len(holder) != 4 or holder[3] != socket.gethostname():
        return None
    process = holder[1]
    if any(process in words and words[-3].endswith(f":{inode}") for words in map(str.split, locks.splitlines())):
        return True
    return None if Path("/proc", process).exists() else False
