"""The folder of an episode, where a program may put links and pipes: no function here follows or waits for one."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Folder:
    """A folder that stays the same one, whatever its path comes to name. Names are relative, without "..".

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._descriptor = path, os.open(path, _FOLDER)

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)

    @property
    def replaced(self) -> bool:
        """Whether its path names something else now."""
        own = os.fstat(self._descriptor)
        try:
            return not os.path.samestat(self.path.lstat(), own)
        except OSError:
            return True

    def write(self, name: str, text: str) -> None:
        """Write a file in place of whatever has its name.

        Raises:
            OSError: something in its place cannot be removed.
        """
        with self._parent(name, make=True) as (parent, last):
            _remove(last, parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(last, flags, 0o666, dir_fd=parent), "w", encoding="utf-8") as file:
                file.write(text)

    def remove(self, name: str) -> None:
        """Remove what has this name, if anything.

        Raises:
            OSError: it cannot be removed.
        """
        try:
            with self._parent(name, make=False) as (parent, last):
                _remove(last, parent)
        except (FileNotFoundError, NotADirectoryError):  # no such folder, or a link in its place
            return

    def read(self, name: str, most: int) -> str:
        """Return the beginning of a regular file.

        Raises:
            OSError: there is none.
            UnicodeDecodeError: it is not UTF-8.
        """
        with self._parent(name, make=False) as (parent, last):
            descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError("not a regular file")
                return file.read(most).decode()

    @contextmanager
    def _parent(self, name: str, *, make: bool) -> Iterator[tuple[int, str]]:
        """Open the folder of a name. Yield its descriptor, and the last part of the name."""
        *folders, last = Path(name).parts
        current = os.dup(self._descriptor)
        try:
            for part in folders:
                try:
                    inner = os.open(part, _FOLDER, dir_fd=current)
                except OSError:
                    if not make:
                        raise
                    _remove(part, current)
                    os.mkdir(part, dir_fd=current)
                    inner = os.open(part, _FOLDER, dir_fd=current)
                os.close(current)
                current = inner
            yield current, last
        finally:
            os.close(current)


def _remove(name: str, parent: int) -> None:
    """Remove a file, a link or a folder."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
