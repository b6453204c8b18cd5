# ruff: noqa: PTH101, PTH102, PTH105, PTH108, PTH112, PTH114, PTH115, PTH116, PTH118, PTH120, PTH123, PTH211, SIM105, UP036
"""The program inside every sandbox: runs commands, keeps their output bounded, moves files. Stands alone.

The coordinator does not run this file: its text is sent as `python3 -I -S -c <text>`, to be process 1 of a
container or box. It knows nothing of this package, and refuses to run as anything but process 1.

Why process 1: the kernel lets nothing inside the sandbox kill or stop it, every orphan becomes its child, `kill(-1)`
is everything but itself, and its end is the end of them all. It is not dumpable, so that no other process can read
its memory, trace it or open its descriptors; frames cannot be forged.

Why so few imports: `json`, `signal` and `pathlib` would double its start (10 ms of CPU each, for `re` and `enum`).
Any CPython from 3.8 runs it. A message is a list of byte fields: u32 count, then u32 length and bytes for each.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

PR_SET_DUMPABLE = 4
SIGINT, SIGKILL, SIGPIPE, SIGXFSZ = 2, 9, 13, 25
SIG_DFL = 0
OOM_SCORE, COMMAND_OOM_SCORE = b"500", b"1000"
"""When memory is short, commands go first, then we, and then whoever started us."""
CHUNK = 65536
DRAIN_S = 0.05
"""After a command has ended, what it left running may write this much longer, then it is killed."""
SETTLE_S = 10.0
"""Killed processes that are not gone by then are stuck in the kernel, and so is the sandbox."""


class Wire:
    """Messages over two descriptors that no command inherits."""

    def __init__(self, source: int, sink: int, expires_s: float) -> None:
        self.source = source
        self.sink = sink
        self.expires_s = expires_s
        self.buffer = bytearray()
        self.fields_left = 0

    def left_s(self) -> float:
        """Seconds this sandbox still has; ends the process when there are none."""
        left = self.expires_s - time.monotonic()
        if left <= 0:
            os._exit(0)
        return left

    def open(self) -> None:
        """Wait for the next message."""
        self.fields_left = self.number()

    def field(self) -> bytes:
        size = self.number()
        self.fields_left -= 1
        return self.exactly(size)

    def text(self) -> str:
        return os.fsdecode(self.field())

    def integer(self) -> int:
        return int(self.field())

    def drain(self) -> None:
        """Skip what a failed operation left unread, so that the next message starts where it should."""
        while self.fields_left > 0:
            self.field()

    def number(self) -> int:
        return int.from_bytes(self.exactly(4), "big")

    def exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            if not select.select([self.source], [], [], self.left_s())[0]:
                continue
            data = os.read(self.source, max(CHUNK, min(size - len(self.buffer), 1 << 20)))
            if not data:
                os._exit(0)  # the owner is gone, and with process 1 goes everything here
            self.buffer += data
        taken = bytes(self.buffer[:size])
        del self.buffer[:size]
        return taken

    def send(self, fields: list[bytes]) -> None:
        packed = [struct.pack(">I", len(fields))]
        for field in fields:
            packed += [struct.pack(">I", len(field)), field]
        view = memoryview(b"".join(packed))
        while view:
            view = view[os.write(self.sink, view[: 1 << 20]) :]


class Capture:
    """Head and tail of one stream within a byte budget, in constant memory, with the exact number of bytes cut."""

    def __init__(self, limit: int) -> None:
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > self.tail_limit + CHUNK:
            del self.tail[: len(self.tail) - self.tail_limit]

    def kept(self) -> bytes:
        return bytes(self.head + self.tail[max(0, len(self.tail) - self.tail_limit) :])


class Processes:
    """The children of process 1: every process of the sandbox, sooner or later."""

    def __init__(self) -> None:
        self.awaited = 0
        self.status: int | None = None

    def reap(self) -> bool:
        """Collect the dead; False when there is no child left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.awaited:
                self.status = status

    def kill_all(self) -> None:
        """Kill everything but ourselves. A fork bomb cannot outrun kill(-1): the kernel signals new forks too."""
        started = time.monotonic()
        while True:
            if os.getpid() != 1:  # anywhere else this would take the whole machine down
                os._exit(3)
            try:
                os.kill(-1, SIGKILL)
            except OSError as error:
                if error.errno not in (errno.ESRCH, errno.EPERM):
                    raise
            if not self.reap():
                return
            if time.monotonic() - started > SETTLE_S:
                os._exit(4)
            time.sleep(0.001)


class Agent:
    """Answers one message at a time until its owner is gone or its time is up."""

    def __init__(self, wire: Wire, libc: ctypes.CDLL, oom_score: int) -> None:
        self.wire = wire
        self.libc = libc
        self.oom_score = oom_score
        self.processes = Processes()
        self.env: dict[bytes, bytes] = {}
        self.limits: list[tuple[int, int]] = []
        self.is_root = os.geteuid() == 0
        self.volunteer(OOM_SCORE)
        if self.is_root:
            os.setgroups([])

    def serve(self) -> NoReturn:
        operations: dict[bytes, Callable[[], list[bytes]]] = {
            b"hello": self.hello,
            b"run": self.run,
            b"write": self.write,
            b"read": self.read,
            b"unpack": self.unpack,
            b"pack": self.pack,
            b"kill": self.kill,
        }
        while True:
            self.wire.open()
            operation = operations[self.wire.field()]
            try:
                answer = [b"ok", *operation()]
            except OSError as error:
                answer = [b"os", errno.errorcode.get(error.errno or 0, "EIO").encode(), str(error).encode()]
            self.wire.drain()
            self.wire.send(answer)

    def hello(self) -> list[bytes]:
        """Fields: ttl in ms, limits, folders, files, environment; each list starts with its count."""
        wire = self.wire
        wire.expires_s = time.monotonic() + wire.integer() / 1000
        for _ in range(wire.integer()):
            name, value = wire.text(), wire.integer()
            self.limits.append((getattr(resource, name), value))
        for _ in range(wire.integer()):
            path, mode, owner = wire.text(), wire.integer(), wire.integer()
            self.make_folder(path)
            os.chmod(path, mode)
            self.own_tree(path, owner)
        for _ in range(wire.integer()):
            self.replace(wire.text(), 0o644, wire.field())
        self.env = {key: value for key, value in os.environb.items() if key != b"PWD"}
        for _ in range(wire.integer()):
            key = wire.field()
            self.env[key] = wire.field()
        return [sys.version.split()[0].encode()]

    def run(self) -> list[bytes]:
        """Fields: uid or -1, timeout in ms, output limit, keep what it leaves running, cwd, stdin, argv, environment.

        Answers wait status, timed out, out of memory, ms, then kept bytes and total of both streams.
        """
        wire = self.wire
        uid, timeout_s, limit = wire.integer(), wire.integer() / 1000, wire.integer()
        keep = bool(wire.integer())
        cwd, stdin = wire.field(), wire.field()
        argv = [wire.field() for _ in range(wire.integer())]
        env = dict(self.env)
        for _ in range(wire.integer()):
            key = wire.field()
            env[key] = wire.field()
        oom_kills = oom_kill_count()
        started = time.monotonic()
        out, err = Capture(limit), Capture(limit)
        timed_out = self.supervise(argv, env, cwd, uid, stdin, keep, started + timeout_s, out, err)
        status = self.processes.status or 0
        answer = [status, int(timed_out), int(oom_kill_count() > oom_kills), int((time.monotonic() - started) * 1000)]
        return [str(n).encode() for n in answer] + [
            out.kept(),
            str(out.total).encode(),
            err.kept(),
            str(err.total).encode(),
        ]

    def supervise(
        self,
        argv: list[bytes],
        env: dict[bytes, bytes],
        cwd: bytes,
        uid: int,
        stdin: bytes,
        keep: bool,
        deadline: float,
        out: Capture,
        err: Capture,
    ) -> bool:
        """Start the command and see it to the end, and all it started unless `keep`. True if it ran out of time."""
        processes = self.processes
        in_r, in_w = os.pipe() if stdin else (os.open(os.devnull, os.O_RDONLY), -1)
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        processes.status = None
        try:
            processes.awaited = self.start(argv, env, cwd, uid, (in_r, out_w, err_w))
        except (OSError, ValueError) as error:
            processes.awaited, processes.status = 0, 126 << 8
            err.add(b"sandbox: " + str(error).encode("utf-8", "replace") + b"\n")
        for fd in (in_r, out_w, err_w):
            os.close(fd)
        captures = {out_r: out, err_r: err}
        if not processes.awaited:
            for fd in (in_w, out_r, err_r):
                if fd >= 0:
                    os.close(fd)
            return False
        try:
            ended = open_pidfd(processes.awaited)
        except OSError:
            ended = -1
        poller = select.poll()
        for fd in (out_r, err_r, self.wire.source):
            poller.register(fd, select.POLLIN)
        if ended >= 0:
            poller.register(ended, select.POLLIN)
        feed = memoryview(stdin)
        if in_w >= 0:
            os.set_blocking(in_w, False)
            poller.register(in_w, select.POLLOUT)

        running, timed_out, killed = True, False, False
        while captures or processes.status is None:
            if running and processes.status is not None:
                running = False
                if ended >= 0:
                    poller.unregister(ended)
                if not killed:
                    deadline = min(deadline, time.monotonic() + DRAIN_S)
            left = deadline - time.monotonic()
            if left <= 0:
                if killed or (keep and not running):
                    break  # a descriptor that outlives every process was handed to the outside: not ours to wait for
                timed_out = running
                processes.kill_all()
                killed = True
                deadline = time.monotonic() + 1.0
                continue
            left = min(left, self.wire.left_s(), 0.005 if ended < 0 and running else 3600.0)
            for fd, _ in poller.poll(max(1, int(left * 1000))):
                if fd == self.wire.source:
                    os._exit(0)  # nobody speaks while a command runs: the owner is gone
                elif fd == in_w:
                    try:
                        feed = feed[os.write(in_w, feed[:CHUNK]) :]
                    except BlockingIOError:
                        continue
                    except OSError:
                        feed = feed[:0]  # the command does not want the rest
                    if not feed:
                        poller.unregister(in_w)
                        os.close(in_w)
                        in_w = -1
                elif fd in captures:
                    data = os.read(fd, CHUNK)
                    if data:
                        captures[fd].add(data)
                    else:
                        poller.unregister(fd)
                        del captures[fd]
            if running:
                processes.reap()
        if not keep:
            processes.kill_all()
        for fd in (in_w, out_r, err_r, ended):
            if fd >= 0:
                os.close(fd)
        return timed_out

    def start(
        self, argv: list[bytes], env: dict[bytes, bytes], cwd: bytes, uid: int, streams: tuple[int, int, int]
    ) -> int:
        """Start the command; its process id. Raises OSError or ValueError where it cannot be started.

        A fork copies this interpreter's page tables, and the child then copies every page it touches: half of what a
        short command costs. Where no limit has to be set in the child, the C library starts it without a copy; whose it
        is, where it is, and that it goes first when memory is short, it inherits from us, who are that for a moment.
        """
        if self.limits:
            return self.fork(argv, env, cwd, uid, streams)
        try:
            self.volunteer(COMMAND_OOM_SCORE)
            if uid >= 0 and self.is_root:
                # Real and effective only: the saved id is our way back. A new program loses it, and with it all
                # capabilities. We stay process 1, which nothing in here can signal, and not dumpable.
                os.setresgid(uid, uid, 0)
                os.setresuid(uid, uid, 0)
            os.chdir(cwd)
            return os.posix_spawn(
                found(argv[0], env),
                argv,
                env,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(streams)],
                setsid=True,
                setsigdef=[SIGPIPE, SIGXFSZ],  # Python ignores them, and exec would hand that on
            )
        except NotImplementedError:  # a C library that cannot begin a session in between
            self.come_back()
            return self.fork(argv, env, cwd, uid, streams)
        finally:
            self.come_back()

    def come_back(self) -> None:
        """Be ourselves again, after a start; or nobody, if that should be refused."""
        try:
            if self.is_root:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
            self.volunteer(OOM_SCORE)
            os.chdir("/")
        except OSError:
            os._exit(5)

    def fork(
        self, argv: list[bytes], env: dict[bytes, bytes], cwd: bytes, uid: int, streams: tuple[int, int, int]
    ) -> int:
        self.volunteer(COMMAND_OOM_SCORE)
        try:
            pid = os.fork()
            if pid == 0:
                self.become(argv, env, cwd, uid, streams)
            return pid
        finally:
            self.volunteer(OOM_SCORE)

    def volunteer(self, score: bytes) -> None:
        """Be killed before others when memory is short; inherited."""
        try:
            os.pwrite(self.oom_score, score, 0)
        except PermissionError:
            pass  # our owner was given a higher one than this, and going below that takes privileges

    def become(
        self, argv: list[bytes], env: dict[bytes, bytes], cwd: bytes, uid: int, streams: tuple[int, int, int]
    ) -> NoReturn:
        """In the forked child: turn into the command. Never returns, whatever goes wrong."""
        try:
            os.setsid()
            for target, fd in enumerate(streams):
                os.dup2(fd, target)
            for kind, value in self.limits:
                resource.setrlimit(kind, (value, value))
            if uid >= 0 and self.is_root:
                os.setgid(uid)
                os.setuid(uid)
            for number in (SIGPIPE, SIGXFSZ):  # Python ignores them, and exec would hand that on
                self.libc.signal(number, ctypes.c_void_p(SIG_DFL))
            os.chdir(cwd)
            os.execvpe(argv[0], argv, env)
        except BaseException as error:
            os.write(2, b"sandbox: " + str(error).encode("utf-8", "replace") + b"\n")
        finally:
            os._exit(126)

    def write(self) -> list[bytes]:
        """Fields: path, mode, content."""
        path, mode = self.wire.text(), self.wire.integer()
        content = self.wire.field()
        self.make_folder(os.path.dirname(path))
        self.replace(path, mode, content)
        return []

    def read(self) -> list[bytes]:
        """Fields: path, limit. Answers size and at most `limit` bytes. Only regular files: a pipe would block."""
        path, limit = self.wire.text(), self.wire.integer()
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)  # `open` below would leave a folder's descriptor open
            raise OSError(errno.EINVAL, "not a regular file", path)
        with open(fd, "rb") as file:
            if found.st_size > limit:
                return [str(found.st_size).encode(), b""]
            content = file.read(limit + 1)  # one more: files of /proc have size 0, and any file may grow
            return [str(max(len(content), found.st_size)).encode(), content[:limit]]

    def unpack(self) -> list[bytes]:
        """Fields: target folder, count, then per entry: kind, path, mode, mtime in ns, content or link target."""
        wire = self.wire
        target = wire.text()
        self.make_folder(target)
        folders = []
        for _ in range(wire.integer()):
            kind, name = wire.field(), wire.text()
            mode, mtime = wire.integer(), wire.integer()
            content = wire.field()
            path = os.path.join(target, name)
            self.make_folder(os.path.dirname(path))
            if kind == b"d":
                # A link planted in a folder's place must not lead what follows elsewhere.
                if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
                    os.unlink(path)
                self.make_folder(path)
                os.chmod(path, mode)
                folders.append((path, mtime))
            elif kind == b"l":
                if os.path.lexists(path):
                    os.unlink(path)
                os.symlink(content, os.fsencode(path))
                self.own(path, os.stat(os.path.dirname(path)).st_uid)
            else:
                self.replace(path, mode, content, mtime)
        for path, mtime in reversed(folders):
            os.utime(path, ns=(mtime, mtime))
        return []

    def pack(self) -> list[bytes]:
        """Fields: folder, limit in bytes. Answers what `unpack` takes, of this file system only."""
        top, limit = self.wire.text(), self.wire.integer()
        device = os.lstat(top).st_dev
        entries: list[bytes] = []
        total = 0

        def add(kind: bytes, path: str, found: os.stat_result, content: bytes) -> None:
            mode = str(stat.S_IMODE(found.st_mode)).encode()
            entries.extend(
                (kind, os.fsencode(os.path.relpath(path, top)), mode, str(found.st_mtime_ns).encode(), content)
            )

        for folder, names, files in os.walk(top):
            for name in sorted(names + files):
                path = os.path.join(folder, name)
                found = os.lstat(path)
                if stat.S_ISLNK(found.st_mode):
                    add(b"l", path, found, os.readlink(os.fsencode(path)))
                elif found.st_dev != device:
                    continue
                elif stat.S_ISDIR(found.st_mode):
                    add(b"d", path, found, b"")
                elif stat.S_ISREG(found.st_mode):
                    total += found.st_size
                    if total > limit:
                        raise OSError(errno.EFBIG, f"more than {limit} bytes", top)
                    with open(path, "rb") as file:
                        add(b"f", path, found, file.read())
                else:
                    raise OSError(errno.EINVAL, "neither file, folder nor link", path)
            names[:] = sorted(n for n in names if is_folder_on(os.path.join(folder, n), device))
        return entries

    def kill(self) -> list[bytes]:
        self.processes.kill_all()
        return []

    def make_folder(self, path: str) -> None:
        """Make `path` and its parents; what is new belongs to the owner of the folder it lands in."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        self.make_folder(parent)
        os.mkdir(path)
        self.own(path, os.stat(parent).st_uid)

    def replace(self, path: str, mode: int, content: bytes, mtime_ns: int = -1) -> None:
        """Put a file in place in one move: no reader sees half of it, and no link or pipe at `path` is followed."""
        folder, name = os.path.split(path)
        partial = os.path.join(folder, f".{name[:200]}.partial")
        if os.path.lexists(partial):
            os.unlink(partial)
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb", 0) as file:
                view = memoryview(content)
                while view:
                    view = view[file.write(view) :]
            self.own(partial, os.stat(folder).st_uid)
            os.chmod(partial, mode)
            if mtime_ns >= 0:
                os.utime(partial, ns=(mtime_ns, mtime_ns))
            os.replace(partial, path)
        except OSError:
            if os.path.lexists(partial):
                os.unlink(partial)
            raise

    def own_tree(self, path: str, uid: int) -> None:
        """Give a folder and all below it to `uid`, touching only what changes hands: a touch costs a copy."""
        if not self.is_root or path == "/":
            return
        paths = [path]
        for folder, names, files in os.walk(path):
            paths += [os.path.join(folder, name) for name in names + files]
        for one in paths:
            if os.lstat(one).st_uid != uid:
                os.chown(one, uid, uid, follow_symlinks=False)

    def own(self, path: str, uid: int) -> None:
        if self.is_root and uid != 0:
            os.chown(path, uid, uid, follow_symlinks=False)


def found(program: bytes, env: dict[bytes, bytes]) -> bytes:
    """Where `program` is, as a shell with this environment would look for it. Raises: FileNotFoundError."""
    if b"/" in program:
        return program
    for folder in env.get(b"PATH", os.defpath.encode()).split(b":"):
        path = os.path.join(folder, program)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)


def open_pidfd(pid: int) -> int:
    """A descriptor that is readable once `pid` has ended; OSError where kernel or Python are too old for it."""
    if sys.version_info >= (3, 9):
        return os.pidfd_open(pid)
    raise OSError(errno.ENOSYS, "no pidfd_open")


def oom_kill_count() -> int:
    """How often the kernel killed here for want of memory; 0 where no cgroup file tells (version 2, then 1)."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path, "rb") as file:
                for line in file:
                    if line.startswith(b"oom_kill "):
                        return int(line.split()[1])
        except OSError:
            continue
    return 0


def is_folder_on(path: str, device: int) -> bool:
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_dev == device


def main() -> NoReturn:
    if os.getpid() != 1:
        sys.exit("the sandbox agent runs as process 1 of a sandbox, and nowhere else")
    libc = ctypes.CDLL(None)
    oom_score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)  # once we are not dumpable we could not any more
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.signal(SIGINT, ctypes.c_void_p(SIG_DFL))  # without a handler the kernel keeps it from process 1
    os.umask(0o022)
    os.get_exec_path({})  # imports what `execvpe` would otherwise import again in every child
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    Agent(Wire(source, sink, time.monotonic() + 600.0), libc, oom_score).serve()


if __name__ == "__main__":
    main()
