"""Files that a user names: errors that are shown as one line, and whole or no files on disk."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOCK_TIMEOUT_S = 60.0  # a lock is held only while a file is read and written, which takes milliseconds


class FileProblem(ValueError):
    """A file that a user named cannot be read or written."""


def is_writable(path: Path) -> bool:
    """Whether a regular file can be written there. A device or a pipe of that name would be replaced, so it cannot."""
    try:
        target = Path(os.path.realpath(path))
        regular = target.is_file() or not target.exists()
        return regular and target.parent.is_dir() and os.access(target.parent, os.W_OK)
    except (OSError, ValueError):  # an invalid file name
        return False


def require_writable(path: Path) -> None:
    """Creates the folder of the file at `path`, which may be a link. Raises FileProblem where it cannot be written."""
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise FileProblem(
            f"cannot write {str(path)!r}: {error.strerror}; allowed: XDG_CACHE_HOME set to a writable folder"
        ) from error
    if target.is_dir():
        raise FileProblem(f"cannot write {str(path)!r}: it is a folder; allowed: a file")


def require_lockable(path: Path) -> None:
    """Raises FileProblem where `locked` or a write would, for commands to call before they measure."""
    require_writable(path)
    with locked(path):
        pass


def write_atomically(path: Path, text: str) -> None:
    """Writes the whole file or nothing; a symbolic link stays one. Raises FileProblem."""
    from ridgeplan.roofline.catalog.files import replacing  # which --help does without

    try:
        with replacing(path) as staging:
            staging.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileProblem(f"cannot write {str(path)!r}: {error.strerror}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a results file, of which every writer takes it to read, extend and replace the file.

    Measure before taking it. The lock is a file beside the results, which stays there; the system releases the lock of
    a process that ends. Raises FileProblem if the lock cannot be taken.
    """
    from filelock import FileLock, Timeout  # 30 ms that commands without results do without

    target = Path(os.path.realpath(path))
    lock = FileLock(target.with_name(f".{target.name}.lock"), timeout=LOCK_TIMEOUT_S, poll_interval=0.01)
    try:
        lock.acquire()
    except Timeout:
        raise FileProblem(
            f"cannot write {str(path)!r}: another process has held {lock.lock_file!r} for {LOCK_TIMEOUT_S:g} seconds"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise FileProblem(f"cannot lock {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    try:
        yield
    finally:
        lock.release()


def json_text(data: Any) -> str:
    """`data` as indented JSON. Raises FileProblem for NaN and infinity, which no result may hold."""
    try:
        return json.dumps(data, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise FileProblem(f"a result is NaN or infinite, so it is not written: {error}") from error


def write_json(path: Path | None, data: Any) -> None:
    """Writes `data` as JSON where a path is given. Raises FileProblem."""
    if path is not None:
        write_atomically(path, json_text(data))
