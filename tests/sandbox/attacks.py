"""What a hostile program may try. Each attack is a program that prints `ESCAPED` wherever an attempt worked.

The programs see `TARGETS` (what lies outside the sandbox), `NR` (numbers of system calls), and three functions:
`attempt` runs something that must fail, `syscall` makes a raw system call, `quiet` runs something whatever comes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """
import ctypes, mmap, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
attempts = 0
def syscall(name, *arguments):
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(NR[name]), *wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result
def attempt(name, action):
    global attempts
    attempts += 1
    try:
        result = action()
    except (OSError, MemoryError, RuntimeError) as error:
        print("contained", name, type(error).__name__, error, flush=True)
    except BaseException as error:
        print("BROKEN", name, type(error).__name__, error, flush=True)
    else:
        print("ESCAPED", name, repr(result)[:80], flush=True)
def quiet(action):
    try:
        action()
    except BaseException:
        pass
def write(path, mode="w"):
    with open(path, mode) as file:
        file.write("escaped")
def read(path):
    with open(path, "rb") as file:
        return file.read(1000)
"""


@dataclass(frozen=True)
class Attack:
    """A program, and how it has to end.

    Attributes:
        name: what it tries.
        code: prints ESCAPED where it works.
        ends: the statuses that are right.
        attempts: whether it counts its attempts, so that one that breaks off early is noticed.
        works_uncontained: whether it prints ESCAPED without a sandbox, and may be let loose to show it.
        files: names that are asked for afterwards and must not be had.
    """

    name: str
    code: str
    ends: tuple[str, ...] = ("finished",)
    attempts: bool = True
    works_uncontained: bool = False
    files: tuple[str, ...] = ()


ABOVE = "the folder above the scratch folder"

ATTACKS = [
    Attack(
        "connecting",
        """
def over(family, kind, address):
    with socket.socket(family, kind) as s:
        s.settimeout(0.5)
        s.connect(address)
        s.send(b"escaped")
attempt("tcp", lambda: over(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", TARGETS["tcp"])))
attempt("udp", lambda: over(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", TARGETS["udp"])))
attempt("unix", lambda: over(socket.AF_UNIX, socket.SOCK_STREAM, TARGETS["unix"]))
attempt("abstract", lambda: over(socket.AF_UNIX, socket.SOCK_STREAM, TARGETS["abstract"]))
attempt("datagram pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(
    b"escaped", TARGETS["datagram"]))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt("io_uring", lambda: syscall("io_uring_setup", 8, ctypes.create_string_buffer(128)))
""",
        works_uncontained=True,
    ),
    Attack(
        "reading",
        """
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", TARGETS["secret"], TARGETS["home"] + "/secret"):
    attempt(path, lambda: read(path))
attempt("listing home", lambda: os.listdir(TARGETS["home"]))
attempt("listing /home", lambda: os.listdir("/home"))
attempt("listing scratch folders", lambda: os.listdir(".."))
def by_chdir():
    os.chdir(TARGETS["arena"])
    return read("secret")
attempt("chdir", by_chdir)
handle = ctypes.create_string_buffer(b"\\x80" + bytes(135))
attempt("handle", lambda: syscall("name_to_handle_at", -100, TARGETS["secret"].encode(), handle,
                                  ctypes.byref(ctypes.c_int()), 0))
""",
        works_uncontained=True,
    ),
    Attack(
        "environments",
        """
attempt("own", lambda: read("/proc/self/environ"))
attempt("parent", lambda: read(f"/proc/{os.getppid()}/environ"))
for pid in [1, *TARGETS["pids"]]:
    attempt(pid, lambda: read(f"/proc/{pid}/environ"))
    attempt(pid, lambda: read(f"/proc/{pid}/cmdline"))
attempt("listing", lambda: os.listdir("/proc"))
if any("SECRET" in name or "top-secret" in value for name, value in os.environ.items()):
    print("ESCAPED environment")
libc.environ  # the C library's own copy
import ctypes.util
environment = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
position = 0
while environment and environment[position]:
    if b"top-secret" in environment[position]:
        print("ESCAPED C environment")
    position += 1
""",
        works_uncontained=True,
    ),
    Attack(
        "writing outside",
        """
for path in (TARGETS["arena"] + "/escaped", TARGETS["writable"], "/tmp/escaped-sandbox", "/dev/shm/escaped-sandbox",
             "/var/tmp/escaped-sandbox", os.__file__, "/escaped-sandbox"):
    attempt(path, lambda: write(path))
attempt("append", lambda: write(TARGETS["writable"], "a"))
attempt("mkdir", lambda: os.mkdir(TARGETS["arena"] + "/escaped"))
attempt("rename out", lambda: (write("mine"), os.rename("mine", TARGETS["arena"] + "/escaped")))
attempt("rename in", lambda: os.rename(TARGETS["writable"], "stolen"))
attempt("unlink", lambda: os.unlink(TARGETS["writable"]))
attempt("fifo", lambda: os.mkfifo(TARGETS["arena"] + "/escaped"))
attempt("device", lambda: write("/dev/kmsg"))
attempt("shared memory", lambda: syscall("shmget", 0, 1 << 20, 0o1600))
attempt("unix socket", lambda: socket.socket(socket.AF_UNIX).bind("socket"))
""",
        works_uncontained=False,
    ),
    Attack(
        ABOVE,
        """
attempt("listing", lambda: os.listdir(".."))
for path in ("../escaped", "../lock", os.getcwd() + "/../escaped"):
    attempt(path, lambda: write(path))
attempt("mkdir", lambda: os.mkdir("../folder"))
attempt("renaming itself", lambda: os.rename("../" + os.path.basename(os.getcwd()), "../escaped"))
""",
    ),
    Attack(
        "links",
        """
os.symlink(TARGETS["secret"], "link")
os.symlink(TARGETS["arena"], "folder")
os.symlink("/etc/passwd", "passwd")
attempt("reading by symlink", lambda: read("link"))
attempt("reading by folder", lambda: read("folder/secret"))
attempt("writing by folder", lambda: write("folder/escaped"))
attempt("hard link", lambda: os.link(TARGETS["secret"], "hard"))
attempt("hard link of writable", lambda: os.link(TARGETS["writable"], "hard"))
attempt("hard link out", lambda: (write("mine"), os.link("mine", TARGETS["arena"] + "/escaped")))
""",
        files=("link", "folder/secret", "passwd", "hard"),
    ),
    Attack(
        "metadata",
        """
target = TARGETS["writable"]
attempt("chmod", lambda: os.chmod(target, 0o777))
attempt("fchmod", lambda: os.fchmod(os.open(os.__file__, os.O_RDONLY), 0o600))
attempt("fchmodat2", lambda: syscall("fchmodat2", -100, target.encode(), 0o777, 0))
attempt("chown", lambda: os.chown(target, os.getuid(), os.getgid()))
attempt("utime", lambda: os.utime(target, (1, 1)))
attempt("setxattr", lambda: os.setxattr(target, "user.escaped", b"1"))
attempt("removexattr", lambda: os.removexattr(target, "user.kept"))
attempt("truncate", lambda: os.truncate(target, 0))
attempt("open and truncate", lambda: os.open(target, os.O_RDONLY | os.O_TRUNC))
attempt("truncate a library", lambda: os.open(os.__file__, os.O_RDONLY | os.O_TRUNC))
""",
    ),
    Attack(
        "signals",
        """
import fcntl
others = [os.getppid(), *TARGETS["pids"]]
for pid in others:
    attempt(f"kill {pid}", lambda: os.kill(pid, signal.SIGKILL))
    attempt(f"probe {pid}", lambda: os.kill(pid, 0))
    attempt(f"tgkill {pid}", lambda: syscall("tgkill", pid, pid, 9))
    attempt(f"tkill {pid}", lambda: syscall("tkill", pid, 9))
    attempt(f"queue {pid}", lambda: syscall("rt_sigqueueinfo", pid, 9, ctypes.create_string_buffer(128)))
    attempt(f"pidfd {pid}", lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 9))
    attempt(f"owner {pid}", lambda: fcntl.fcntl(os.pipe()[0], 8, pid))
    attempt(f"limits {pid}", lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)))
    attempt(f"affinity {pid}", lambda: os.sched_setaffinity(pid, {0}))
    attempt(f"priority {pid}", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
attempt("everyone", lambda: os.kill(-1, 9))
attempt("own group", lambda: os.kill(0, 9))
attempt("own group by number", lambda: os.killpg(os.getpgrp(), 9))
attempt("dying with another", lambda: syscall("prctl", 1, 0, 0, 0, 0))
""",
    ),
    Attack(
        "other processes' memory",
        """
for pid in (os.getppid(), *TARGETS["pids"]):
    attempt(f"attach {pid}", lambda: syscall("ptrace", 16, pid, 0, 0))
    attempt(f"seize {pid}", lambda: syscall("ptrace", 0x4206, pid, 0, 0))
    attempt(f"memory {pid}", lambda: open(f"/proc/{pid}/mem", "rb"))
    attempt(f"vm {pid}", lambda: syscall("process_vm_readv", pid, 0, 0, 0, 0, 0))
attempt("traceme", lambda: syscall("ptrace", 0, 0, 0, 0))
attempt("kcmp", lambda: syscall("kcmp", os.getpid(), os.getppid(), 0, 0, 0))
""",
    ),
    Attack(
        "other programs",
        """
import subprocess
attempt("subprocess", lambda: subprocess.run(["/bin/true"]))
attempt("posix_spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
attempt("execv", lambda: os.execv("/bin/echo", ["echo", "ESCAPED"]))
attempt("execv of python", lambda: os.execv(sys.executable, [sys.executable, "-c", "print('ESCAPED')"]))
attempt("execveat", lambda: syscall("execveat", -100, b"/bin/true", 0, 0, 0))
attempt("memfd", lambda: os.memfd_create("program"))
if os.system("/bin/true") == 0:
    print("ESCAPED system")
""",
    ),
    Attack(
        "daemonising",
        """
def daemon():
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    return pid
attempt("fork", daemon)
attempt("vfork", lambda: syscall("clone", 0x4111, 0, 0, 0, 0) or os._exit(0))
attempt("clone", lambda: syscall("clone", 17, 0, 0, 0, 0) or time.sleep(60))
attempt("clone3", lambda: syscall("clone3", ctypes.create_string_buffer(88), 88) or time.sleep(60))
attempt("setsid", os.setsid)
attempt("setpgid", lambda: os.setpgid(0, 0))
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
""",
    ),
    Attack(
        "fork bomb",
        """
attempts = 1
while True:
    quiet(os.fork)
    quiet(lambda: syscall("clone", 17, 0, 0, 0, 0))
""",
        ends=("timeout",),
        attempts=False,
    ),
    Attack(
        "thread bomb",
        """
threading.stack_size(32768)
started = 0
try:
    for _ in range(5000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        started += 1
except RuntimeError:
    pass
print("started", started)
if started > 500:
    print("ESCAPED", started)
os._exit(0)
""",
        attempts=False,
    ),
    Attack(
        "memory",
        """
attempt("bytes", lambda: bytearray(8 << 30))
attempt("mapping", lambda: mmap.mmap(-1, 8 << 30))
attempt("private mapping", lambda: mmap.mmap(-1, 8 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
def bit_by_bit():
    held = []
    while len(held) < 800:
        held.append(bytearray(10 << 20))
    return len(held)
attempt("bit by bit", bit_by_bit)
""",
    ),
    Attack("memory, uncaught", "x = []\nwhile True: x.append(bytearray(10 << 20))", ends=("memory",), attempts=False),
    Attack(
        "one large file",
        """
def fill(path="large"):
    with open(path, "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
attempt("writing", fill)
attempt("ftruncate", lambda: os.ftruncate(os.open("sparse", os.O_CREAT | os.O_RDWR), 64 << 20))
attempt("fallocate", lambda: os.posix_fallocate(os.open("allocated", os.O_CREAT | os.O_RDWR), 0, 64 << 20))
attempt("fallocate past the end", lambda: syscall(
    "fallocate", os.open("kept", os.O_CREAT | os.O_RDWR), 1, 0, 64 << 20))
""",
    ),
    Attack(
        "many large files",
        """
for number in range(10000):
    with open(str(number), "wb") as file:
        file.write(bytes(1 << 20))
    time.sleep(0.02)
""",
        ends=("disk",),
        attempts=False,
    ),
    Attack(
        "many small files",
        "for number in range(10**6):\n    open(str(number), 'w').close()\n    time.sleep(0.001)",
        ends=("disk",),
        attempts=False,
    ),
    Attack(
        "deep folders",
        "for _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\ntime.sleep(60)",
        ends=("disk",),
        attempts=False,
    ),
    Attack(
        "locked folders",
        """
os.makedirs("a/b")
write("a/b/file")
os.mkdir("locked", 0)
os.mkdir("hidden", 0o300)
os.mkdir("hidden/inner", 0o300)
write("hidden/inner/file")
os.umask(0o777)
write("unreadable")
""",
        ends=("finished", "disk"),
        attempts=False,
    ),
    Attack(
        "endless output",
        "while True: print('x' * 10000)",
        ends=("output", "timeout"),
        attempts=False,
    ),
    Attack("endless loop", "while True: pass", ends=("timeout",), attempts=False),
    Attack(
        "endless loop that catches all",
        """
def nothing(*arguments): pass
for number in range(1, 65):
    quiet(lambda: signal.signal(number, nothing))
while True:
    try:
        while True: time.sleep(0.01)
    except BaseException:
        pass
""",
        ends=("timeout",),
        attempts=False,
    ),
    Attack("endless computation", "sum(range(10**12))", ends=("timeout",), attempts=False),
    Attack("stopping itself", "os.kill(os.getpid(), signal.SIGSTOP)", ends=("timeout",), attempts=False),
    Attack(
        "raising its limits",
        """
for name in ("AS", "CPU", "FSIZE", "NPROC", "NOFILE", "CORE", "MEMLOCK", "STACK"):
    which = getattr(resource, f"RLIMIT_{name}")
    soft, hard = resource.getrlimit(which)
    for value in (hard + 1, 2**64 - 1):
        attempt(name, lambda: syscall("prlimit64", 0, which, struct.pack("QQ", value, value), 0))
    if hard == resource.RLIM_INFINITY:
        print("ESCAPED", name)
for name in ("setuid", "setgid", "setfsuid"):
    attempt(name, lambda: syscall(name, 0))
attempt("setgroups", lambda: os.setgroups([0]))
attempt("capset", lambda: syscall("capset", ctypes.create_string_buffer(b"\\x22\\x05\\x08\\x20" + bytes(4)),
                                  ctypes.create_string_buffer(b"\\xff" * 24)))
""",
    ),
    Attack(
        "kernel interfaces",
        """
attempt("unshare user", lambda: syscall("unshare", 0x10000000))
attempt("unshare mounts", lambda: syscall("unshare", 0x20000))
attempt("setns", lambda: syscall("setns", 0, 0))
attempt("clone user", lambda: syscall("clone", 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0))
attempt("mount", lambda: syscall("mount", b"none", b".", b"tmpfs", 0, 0))
attempt("chroot", lambda: os.chroot("."))
attempt("bpf", lambda: syscall("bpf", 0, 0, 0))
attempt("perf", lambda: syscall("perf_event_open", 0, 0, -1, -1, 0))
attempt("keyctl", lambda: syscall("keyctl", 0, -3, 0, 0, 0))
attempt("userfaultfd", lambda: syscall("userfaultfd", 1))
attempt("personality", lambda: syscall("personality", 0x40000))
attempt("seccomp", lambda: syscall("seccomp", 0, 0, 0))
attempt("unknown", lambda: libc.syscall(ctypes.c_long(1000)) >= 0 or (_ for _ in ()).throw(OSError("unknown")))
attempt("terminal", lambda: __import__("fcntl").ioctl(0, 0x5412, b"x"))
attempt("inotify", lambda: syscall("inotify_init1", 0))
""",
    ),
    Attack(
        "the x32 interface",
        """
import platform
if platform.machine() == "x86_64":
    libc.syscall(ctypes.c_long(0x40000000 | 39))
    print("ESCAPED")
else:
    os.kill(os.getpid(), signal.SIGSYS)
""",
        ends=("killed",),
        attempts=False,
    ),
    Attack(
        "the worker's pipes",
        """
for number in range(3, 20):
    for junk in (b"\\n", b"{}\\n", b"[1]\\n", b'{"ending": "unconfined", "reason": "x"}\\n', b'{"value": 1}\\n',
                 b"[" * 100000 + b"\\n", b"\\xff" * 1000):
        quiet(lambda: os.write(number, junk))
for number in range(3, 20):
    quiet(lambda: os.close(number))
""",
        ends=("finished", "killed"),
        attempts=False,
    ),
    Attack(
        "closing everything",
        "os.closerange(0, 64)\nwhile True: time.sleep(1)",
        ends=("timeout",),
        attempts=False,
    ),
    Attack("crashing", "ctypes.string_at(0)", ends=("killed",), attempts=False),
    Attack(
        "devices and folders for files",
        "os.mkdir('folder')\nquiet(lambda: os.mkfifo('fifo'))\nos.symlink('/dev/zero', 'zero')\nos.symlink('..', 'up')",
        attempts=False,
        files=("folder", "fifo", "zero", "up/lock"),
    ),
]
