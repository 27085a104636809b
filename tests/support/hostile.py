"""Programs that try to break out of the sandbox, each written to print BREACH once it has done what it should not.

`{name}` fields are filled by the test: a secret file, a file shown to the program, sockets that listen, our pid.
"""

TRY = """
import ctypes, os, socket, sys, time
def attempt(action, *args, **kwargs):
    try:
        result = action(*args, **kwargs)
    except BaseException as error:
        print("refused", type(error).__name__)
    else:
        print("BREACH", action, repr(result)[:80])
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
"""

# programs that attempt one forbidden thing after the other and end by themselves
ATTEMPTS = {
    "read the home directory": """
attempt(open, {secret!r})
for path in {home!r}:
    attempt(open, path); attempt(os.listdir, path)
""",
    "write outside": """
for path in ("/tmp/x", "/x", "../x", {outside!r} + "/x", os.path.dirname(os.__file__) + "/x", "/usr/x", "/etc/x",
             "/dev/shm/x", "/var/tmp/x"):
    attempt(open, path, "w"); attempt(os.mkdir, path)
""",
    "spoil what it may read": """
attempt(open, {shown!r}, "w"); attempt(open, {shown!r}, "a"); attempt(os.open, {shown!r}, os.O_RDONLY | os.O_TRUNC)
attempt(os.truncate, {shown!r}, 0); attempt(os.remove, {shown!r}); attempt(os.rename, {shown!r}, "mine")
attempt(os.chmod, {shown!r}, 0); attempt(os.utime, {shown!r}, (1, 1)); attempt(os.chown, {shown!r}, 12, 12)
attempt(os.setxattr, {shown!r}, "user.x", b"1"); attempt(os.replace, "main.py", {shown!r})
""",
    "delete files": """
import shutil
attempt(os.remove, {secret!r}); attempt(os.rmdir, {outside!r}); attempt(shutil.rmtree, {outside!r})
attempt(os.remove, os.__file__); attempt(os.rename, {outside!r}, {outside!r} + "2")
""",
    "links to what it may not read": """
for link in (os.symlink, os.link):
    try:
        link({secret!r}, "link" + link.__name__)
    except OSError:
        print("refused")
    else:
        attempt(open, "link" + link.__name__); attempt(open, "link" + link.__name__, "w")
""",
    "tcp": "attempt(socket.create_connection, ('127.0.0.1', {port}), 1); attempt(socket.socket)",
    "udp": "attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port})))",
    "raw and other sockets": """
for family in (socket.AF_PACKET, socket.AF_NETLINK, getattr(socket, "AF_VSOCK", 40), socket.AF_INET6):
    for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM, socket.SOCK_STREAM):
        attempt(socket.socket, family, kind)
""",
    "unix sockets": """
for address in ({unix!r}, chr(0) + {abstract!r}):
    attempt(lambda: socket.socket(socket.AF_UNIX).connect(address))
    attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", address))
    attempt(lambda: socket.socketpair()[0].connect(address))
""",
    "dns": "attempt(socket.getaddrinfo, 'pypi.org', 443); attempt(socket.gethostbyname, 'example.com')",
    "the parent's memory and environment": """
for name in ("environ", "mem", "cmdline", "maps", "fd", "cwd/.", "root/."):
    for pid in ({parent}, os.getppid(), 1):
        attempt(os.listdir if name in ("fd", "cwd/.", "root/.") else open, f"/proc/{{pid}}/{{name}}")
""",
    "ptrace": """
for pid in ({parent}, os.getppid()):
    attempt(call, "ptrace", 16, pid, 0, 0); attempt(call, "ptrace", 0x4206, pid, 0, 0)
    attempt(call, "process_vm_readv", pid, ctypes.create_string_buffer(64), 1, ctypes.create_string_buffer(64), 1, 0)
""",
    "the parent's limits and priority": """
import resource
for pid in ({parent}, os.getppid()):
    attempt(resource.prlimit, pid, resource.RLIMIT_CPU, (1, 1)); attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)
    attempt(os.sched_setaffinity, pid, [0])
""",
    "its own limits": """
import resource
for name in ("CPU", "AS", "FSIZE", "NOFILE", "CORE", "MEMLOCK"):
    limit = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(limit)
    assert hard >= 0, name
    attempt(resource.setrlimit, limit, (hard + 1, hard + 1))
    attempt(resource.setrlimit, limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
""",
    "privileges": """
attempt(os.setuid, 0 if os.getuid() else 1); attempt(os.setgid, 1 if os.getgid() != 1 else 2)
attempt(os.setgroups, [0]); attempt(os.chroot, "."); attempt(os.nice, -5)
attempt(call, "unshare", 0x10000000); attempt(call, "unshare", 0x20000); attempt(call, "setns", 0, 0)
attempt(call, "mount", b"none", b"/", b"tmpfs", 0, 0); attempt(call, "umount2", b"/", 2)
attempt(os.mknod, "d", 0o20666, 259)
attempt(call, "prctl", 1, 0); attempt(call, "personality", 0x40000); attempt(call, "reboot", 0)
attempt(call, "sethostname", b"x", 1)
""",
    "signals by way of a file": """
import fcntl
r, w = os.pipe()
for pid in ({parent}, os.getppid()):
    attempt(fcntl.fcntl, r, fcntl.F_SETOWN, pid); attempt(fcntl.fcntl, r, 10, 9)
    attempt(fcntl.ioctl, r, 0x8901, pid)
""",
    "names of files by a watch": """
folder = os.path.dirname({secret!r}).encode()
attempt(call, "inotify_add_watch", libc.inotify_init1(0), folder, 0x100)
attempt(call, "inotify_add_watch", libc.inotify_init(), folder, 0x100)
attempt(call, "fanotify_mark", libc.fanotify_init(0x200 | 0x400 | 0x800, 0), 1, 0x100, -100, folder)
""",
    "memory that no limit counts": """
attempt(call, "shmget", 0, 1 << 30, 0o1666); attempt(call, "memfd_create", b"x", 0)
attempt(call, "msgget", 0, 0o1666)
attempt(call, "semget", 0, 1, 0o1666); attempt(call, "syscall", 447, 0)
""",
    "calls around the filter": """
attempt(call, "syscall", 425, 8, ctypes.create_string_buffer(256)); attempt(call, "syscall", 435, None, 0)
attempt(call, "syscall", 437, -100, b"/etc/passwd", None, 0); attempt(call, "syscall", 321, 0, None, 0)
attempt(call, "syscall", 298, None, 0, 0, 0, 0); attempt(call, "syscall", 323, 1); attempt(call, "syscall", 250, 0, 0)
""",
    "open descriptors": """
for fd in range(3, 64):
    attempt(os.fstat, fd)
attempt(os.write, 0, b"x"); attempt(os.ftruncate, 0, 1 << 20)
""",
    "environment": """
for name in set(os.environ) - {{"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "PYTHONPATH"}}:
    if not name.endswith("_NUM_THREADS") and name != "MALLOC_ARENA_MAX":
        print("BREACH", name)
attempt(lambda: os.environ["GRPO_EXT_TEST_SECRET"])
print("refused")
""",
    "other programs": """
import subprocess
attempt(subprocess.check_output, ["sh", "-c", "cat " + {secret!r}]); attempt(os.fork)
attempt(os.posix_spawn, "/bin/ls", ["ls"], {{}})
os.execv("/bin/sh", ["sh", "-c", "read x < {secret} && echo BREACH; echo > {outside}/x && echo BREACH; echo refused"])
""",
    "its own executables": """
import shutil
shutil.copyfile("/bin/ls", "ls")
try:
    os.chmod("ls", 0o755)
except OSError:
    print("refused")
attempt(os.execv, "./ls", ["./ls"])
""",
    "all the files at once": """
files = []
try:
    while len(files) < 100_000:
        files.append(open("main.py"))
    print("BREACH")
except OSError:
    print("refused" if len(files) < 64 else "BREACH", len(files))
""",
    "20 GiB": """
import mmap
attempt(bytearray, 20 << 30); attempt(mmap.mmap, -1, 20 << 30)
blocks = []
try:
    while len(blocks) < 40:
        blocks.append(bytearray(10 << 20))
    print("BREACH")
except MemoryError:
    blocks = []
    print("refused")
""",
    "fill the disk": """
written = 0
for name in range(60):
    try:
        with open(f"f{{name}}", "wb", buffering=0) as file:
            for _ in range(64):
                written += file.write(bytes(1 << 20))
    except OSError:
        print("refused")
    if written > 200 << 20:
        print("BREACH", written)
        break
    time.sleep(0.02)
""",
}

# programs that go on until they are ended
ENDLESS = {
    "fork bomb": "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "infinite loop": "while True: pass",
    "sleep": "time.sleep(1e6)",
    "deaf to signals": """
import signal
for number in set(range(1, 65)) - {{9, 19, 32, 33}}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: time.sleep(1)
""",
    "closed outputs": "os.close(1); os.close(2)\nwhile True: time.sleep(1)",
    "stdout by the gigabyte": "while True: os.write(1, bytes(1 << 20))",
    "stderr by the gigabyte": "while True: os.write(2, bytes(1 << 20))",
    "thread bomb": """
import threading
threading.stack_size(32768)
while True:
    try:
        threading.Thread(target=time.sleep, args=(1e6,)).start()
    except RuntimeError:
        pass
""",
    "many small files": """
n = 0
while True:
    n += 1
    try:
        open(f"f{{n}}", "w").close()
    except OSError:
        pass
""",
    "closing its folder": """
for _ in range(3):
    try:
        os.mkdir("d"); os.chdir("d")
    except OSError:
        pass
for path in (".", "..", os.environ["HOME"], os.environ["HOME"] + "/d"):
    try:
        os.chmod(path, 0)
    except OSError:
        pass
while True: time.sleep(1)
""",
    "folders without end": """
while True:
    try:
        os.mkdir("d"); os.chdir("d")
    except OSError:
        pass
""",
    "never leaving": """
import atexit
atexit.register(time.sleep, 1e6)
sys.exit = lambda *_: time.sleep(1e6)
sys.exit(0)
""",
    "suspended": """
try:
    os.kill(os.getpid(), 19)
except OSError:
    pass
time.sleep(1e6)
""",
    "silent daemon": """
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(64):
                try:
                    os.close(fd)
                except OSError:
                    pass
            while True: time.sleep(1)
        os._exit(0)
except OSError:
    pass
time.sleep(1e6)
""",
}

# programs that may end themselves, but not us
KILLERS = {
    "kill the parent": """
for pid in (os.getppid(), {parent}, 1):
    for number in (9, 15, 19):
        try:
            os.kill(pid, number)
        except OSError:
            print("refused")
""",
    "kill the group": "os.killpg(0, 9)",
    "kill everyone": "os.kill(-1, 9)\nos.kill(-1, 15)",
    "segfault": "ctypes.string_at(0)",
    "recursion": "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "abort": "os.abort()",
    "exit": "os._exit(7)",
    "exec": "os.execv('/bin/false', ['false'])",
}
