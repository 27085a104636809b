"""A child process that dies before one of its operations on the disk."""

import os
import sys

CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.link", "os.symlink")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def changes_the_disk(event: str, args: tuple) -> bool:
    """Whether an audit event is an operation that a kill before it, or after it, tells apart."""
    return event in CHANGES or (event == "open" and bool(args[2] & WRITES))


def killed_at(operation: int, action) -> bool:
    """Run in a child that dies before its n-th operation on the disk; whether it died."""
    child = os.fork()
    if child == 0:
        left = [operation]

        def count(event, args):
            if changes_the_disk(event, args):
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)

        sys.addaudithook(count)
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), code
    return code == 9
