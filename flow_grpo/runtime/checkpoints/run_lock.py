"""One run, one folder: two processes that save into one folder would destroy each other's checkpoints.

That happens by accident: a launcher that was killed leaves its ranks behind for a while, and the run is started again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

LOCK = ".lock"
_log = logging.getLogger(__name__)


class RunLock:
    """The claim of a process on a run's folder, which ends with the process, however that ends.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def take(self) -> None:
        """Claim the folder, unless that was done; it is made if it is missing.

        Raises:
            ValueError: another process holds it.
            OSError: it cannot be written to.
        """
        if self._descriptor is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder = os.read(self._descriptor, 200).decode(errors="replace")
                self.release()
                raise ValueError(
                    f"run folder {self._folder} is in use by {holder or 'another process'}; wait until that has ended, "
                    "or pass another --config.run_name"
                ) from None
            # Some network file systems know no locks: the run goes on without.
            _log.warning("%s cannot be locked (%s): see that no other run uses it", self._folder, error)
        os.truncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Let go of the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        """Let go of it with the last reference, as after an error in a process that goes on."""
        self.release()
