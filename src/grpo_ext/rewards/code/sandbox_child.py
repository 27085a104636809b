"""Launcher of the sandbox: gives up every right it can, then becomes the untrusted program.

Run as compiled code in an isolated interpreter (`python -I -S`), never imported; it imports few modules, since imports
are most of the cost of a run. Its arguments are two descriptors: a file with its own code and then the job (marshal),
and the status pipe, on which it writes "R" when the program is about to start, or "!" and the error. That pipe closes
when the program starts, so the program cannot write on it.
"""

from __future__ import annotations

import _signal as signal  # `signal` costs a tenth of a run: it makes enums
import ctypes
import errno
import marshal
import os
import resource
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing costs more than all the rest
    from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 4, 22, 38
_NEW_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # mount, pid, network, ipc, uts
_NEW_USER = 0x10000000
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE, _DETACH = 2, 4, 8, 4096, 16384, 1 << 18, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446  # on every architecture
_AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = -100, 0x8000, 1, 2
_NOBODY = 65534
_FS_EXECUTE, _FS_WRITE, _FS_READ, _FS_READ_DIR = 1, 2, 4, 8
_FS_REMOVE_FILE, _FS_MAKE_FILE, _FS_TRUNCATE = 1 << 5, 1 << 8, 1 << 14


def main() -> None:
    """Become the program, or write the error to the status pipe."""
    status = int(sys.argv[2])
    try:
        with os.fdopen(int(sys.argv[1]), "rb") as file:
            file.seek(0)
            marshal.load(file)  # this code
            job = marshal.load(file)
        os.set_inheritable(status, False)
        _launch(job, status)
    except BaseException as error:
        os.write(status, f"!{type(error).__name__}: {error}".encode()[:2000])
        os._exit(125)


def _launch(job: dict[str, Any], status: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # do not inherit what the trainer blocks or ignores
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _die_with_parent()
    if os.getppid() != job["parent"]:  # it died before `_die_with_parent`
        os._exit(125)
    if job["method"] == "namespaces":
        _enter_namespaces(job)
    else:
        os.chdir(job["folder"])
        _drop_capabilities()
    _write_files(job["files"])
    _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if job["method"] == "landlock":
        _restrict_files(job)
    for name, value in job["limits"].items():
        limit = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if job["filter"]:
        _install_filter(job["filter"])
    os.write(status, b"R")
    os.execve(job["argv"][0], job["argv"], job["env"])


def _call(name: str, *arguments: object) -> int:
    """Call a libc function that returns -1 on failure."""
    result: int = getattr(_LIBC, name)(*(a.encode() if isinstance(a, str) else a for a in arguments))
    if result == -1:
        code = ctypes.get_errno()
        shown = [a for a in arguments if isinstance(a, str | int)]
        raise OSError(code, f"{name}{tuple(shown)}: {os.strerror(code)}")
    return result


def _die_with_parent() -> None:
    _call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# namespaces


def _enter_namespaces(job: dict[str, Any]) -> None:
    """Enter new namespaces. Return only in the grandchild, an unprivileged process that becomes the program.

    There are three processes, and our parent knows the first. Its child is the first process of the new PID
    namespace: when it ends, the kernel kills all others there. The grandchild is the program.
    """
    root = os.geteuid() == 0
    try:
        if not root:
            raise PermissionError
        _call("unshare", _NEW_NAMESPACES)
    except PermissionError:
        root = False
        _enter_user_namespace()
    _die_with_parent()  # a change of credentials resets it
    first = os.fork()
    if first:
        _relay(first)
    _die_with_parent()
    os.setsid()  # a signal to a process group must not leave the namespace
    _build_root(job)
    if root:
        _drop_root(job["uid"])
    _drop_capabilities()
    _call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)
    _die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    program = os.fork()
    if program:
        _reap(program, job["deadline_s"])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    os.setsid()
    _die_with_parent()


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEW_NAMESPACES | _NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {uid} 1"), ("gid_map", f"{_NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _relay(first: int) -> None:
    """Wait until the namespace, and with it every process in it, has ended; SIGTERM ends it."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
    _, state = os.waitpid(first, 0)
    os._exit(_shell_code(state))


def _reap(program: int, seconds: float) -> None:
    """Wait for the program, reap orphans, and end the namespace, at the latest after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        while True:
            try:
                pid, state = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                os._exit(125)
            if pid == program:
                os._exit(_shell_code(state))
            if pid == 0:
                break
        if time.monotonic() > deadline:
            os._exit(128 + signal.SIGKILL)
        signal.sigtimedwait([signal.SIGCHLD], max(0.0, deadline - time.monotonic()))


def _shell_code(state: int) -> int:
    code = os.waitstatus_to_exitcode(state)
    return code if code >= 0 else 128 - code


def _build_root(job: dict[str, Any]) -> None:
    """Build a root with the job's files, read-only, and one small writable folder in memory."""
    _call("mount", "none", "/", None, _REC | _PRIVATE, None)
    _call("mount", "tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, b"size=1m,mode=755")
    os.chdir("/tmp")
    os.mkdir("old")
    _call("syscall", _PIVOT_ROOT[os.uname().machine], b".", b"old")
    os.chdir("/")
    for link, target in job["links"].items():
        os.symlink(target, link)
    for path in job["readable"]:
        _bind(path)
    _call("umount2", "/old", _DETACH)
    os.rmdir("/old")
    os.makedirs(job["folder"])
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    pointer = ctypes.byref(attributes)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, pointer, ctypes.c_size_t(32))
    options = f"size={job['disk_bytes']},nr_inodes={job['max_files']},mode=1777"
    _call("mount", "tmpfs", job["folder"], "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)
    os.chdir(job["folder"])


def _bind(path: str) -> None:
    source = "/old" + path
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    _call("mount", source, path, None, _BIND | _REC, None)


def _drop_root(uid: int) -> None:
    """Become a user of its own, so that the limit on processes counts only this program's."""
    os.setgroups([])
    try:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:  # a container that maps few users
        if error.errno != errno.EINVAL:
            raise
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


# all methods


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _write_files(files: dict[str, bytes]) -> None:
    for name, content in files.items():
        with open(name, "wb") as file:
            file.write(content)


def _install_filter(filter_: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    program = Program(len(filter_) // 8, filter_)
    _call("prctl", _SET_SECCOMP, 2, ctypes.byref(program), 0, 0)


# Landlock, https://docs.kernel.org/userspace-api/landlock.html


def _restrict_files(job: dict[str, Any]) -> None:
    """Allow only reading and executing the job's paths, and reading and writing plain files in its folder."""
    abi = _call("syscall", _LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1  # every right this kernel knows
    network = 0 if abi < 4 else 3  # bind and connect by TCP
    scoped = 0 if abi < 6 else 3  # abstract sockets, signals
    attributes = (ctypes.c_uint64 * 3)(handled, network, scoped)
    size = ctypes.c_size_t(8 if abi < 4 else 16 if abi < 6 else 24)
    ruleset = _call("syscall", _LANDLOCK_CREATE, ctypes.byref(attributes), size, 0)
    folder_rights = _FS_READ | _FS_WRITE | _FS_READ_DIR | _FS_REMOVE_FILE | _FS_MAKE_FILE | _FS_TRUNCATE
    _allow(ruleset, job["folder"], folder_rights & handled)
    for path in job["readable"]:
        rights = _FS_EXECUTE | _FS_READ | (_FS_READ_DIR if os.path.isdir(path) else 0)
        _allow(ruleset, path, rights | (_FS_WRITE if path == "/dev/null" else 0))
    _call("syscall", _LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))

    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _call("syscall", _LANDLOCK_ADD, ruleset, 1, ctypes.byref(Beneath(rights, folder)), 0)
    finally:
        os.close(folder)


if __name__ == "__main__":
    main()
