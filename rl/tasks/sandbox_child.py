"""Runs inside the sandbox's process, alone and on the standard library: gives up every right that a solution needs
not, then runs it. Arguments: JSON limits; the descriptor on which one byte says that the locks are in place.

Locks, in this order; none can be undone by the process: resource limits (below their hard values), no new privileges,
no capabilities, Landlock (files: read the interpreter and its libraries, write the working directory; no TCP; no
signals to other processes), seccomp (no new processes, programs, sockets, or looks into other processes)."""

import ctypes
import json
import os
import platform
import resource
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_DUMPABLE = 38, 22, 4
EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x10000
# Numbers of system calls, (x86-64, AArch64); None where the machine has no such call.
CALLS = {
    "clone": (56, 220), "clone3": (435, 435), "fork": (57, None), "vfork": (58, None),
    "kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261),
}  # fmt: skip
FORBIDDEN = {
    "execve": (59, 221), "execveat": (322, 281), "socket": (41, 198), "connect": (42, 203), "bind": (49, 200),
    "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242), "ptrace": (101, 117), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "io_uring_setup": (425, 425),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "setsid": (112, 157), "setpgid": (109, 154), "setpriority": (141, 140),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip


def limit(limits):
    """CPU seconds, address space, size of a file, open files; no core dumps."""
    for name, value in (
        ("RLIMIT_CPU", limits["cpu_seconds"]),
        ("RLIMIT_AS", limits["memory"]),
        ("RLIMIT_FSIZE", limits["file_size"]),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_CORE", 0),
    ):
        resource.setrlimit(getattr(resource, name), (value, value))
    # Root is exempt from it; the filter below forbids new processes to everyone.
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))


def check(result, what):
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result


def drop_capabilities():
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header = struct.pack("Ii", 0x20080522, 0)
    check(LIBC.capset(header, bytes(24)), "capset")


def landlock(readable, writable):
    """Allow reading below `readable` and everything below `writable`; nothing else, and no TCP."""
    create, add, restrict = 444, 445, 446  # the same on both machines
    version = check(LIBC.syscall(create, None, 0, 1), "this kernel has no Landlock")
    # Rights 0-12 of the first version; then refer (2), truncate (3), device ioctl (5).
    files = (1 << 13) - 1 | (1 << 13) * (version >= 2) | (1 << 14) * (version >= 3) | (1 << 15) * (version >= 5)
    read = 1 << 0 | 1 << 2 | 1 << 3  # execute, read file, read directory
    attributes = struct.pack("QQQ", files, 3 * (version >= 4), 3 * (version >= 6))
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = check(LIBC.syscall(create, attributes, size, 0), "landlock_create_ruleset")
    for path, rights in [*((p, read) for p in readable), *((p, files) for p in writable)]:
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            rights &= 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14  # what a file can be granted
            rights &= files
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        check(LIBC.syscall(add, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0), "landlock_add_rule " + path)
        os.close(descriptor)
    check(LIBC.syscall(restrict, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def seccomp():
    """A filter of system calls by number and first arguments; the kernel keeps it for the life of the process."""
    machine = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}.get(platform.machine())
    if machine is None:
        raise OSError(ENOSYS, "no list of system calls for " + platform.machine())
    column, architecture = machine
    number = {name: numbers[column] for name, numbers in {**CALLS, **FORBIDDEN}.items() if numbers[column] is not None}
    load, equal, greater, test, ret = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, missing, kill = 0x7FFF0000, 0x00050000 | EPERM, 0x00050000 | ENOSYS, 0x80000000
    first, offset = 16, 0  # of the first argument's lower half, and of the call's number
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (ret, 0, 0, kill), (load, 0, 0, offset)]
    program += [(greater, 0, 1, 0x40000000), (ret, 0, 0, kill)]  # the x32 calls
    for name in (*FORBIDDEN, "fork", "vfork"):
        if name in number:
            program += [(equal, 0, 1, number[name]), (ret, 0, 0, deny)]
    program += [(equal, 0, 1, number["clone3"]), (ret, 0, 0, missing)]  # then threads are made by clone
    program += [(equal, 0, 4, number["clone"]), (load, 0, 0, first), (test, 0, 1, CLONE_THREAD), (ret, 0, 0, allow)]
    program += [(ret, 0, 0, deny)]
    for name, allowed in (("kill", os.getpid()), ("tgkill", os.getpid()), ("prlimit64", 0)):
        program += [(equal, 0, 4, number[name]), (load, 0, 0, first), (equal, 0, 1, allowed), (ret, 0, 0, allow)]
        program += [(ret, 0, 0, deny)]
    program += [(ret, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    filled = Program(len(program), ctypes.addressof(code))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.byref(filled), 0, 0), "this kernel has no seccomp filters")


def calls(solution):
    """Evaluate the expressions of stdin (JSON) after the solution; their `repr`s go where stdout went."""
    expressions = json.loads(sys.stdin.read())
    results = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    scope = {"__name__": "solution"}
    exec(solution, scope)
    results.write(json.dumps([repr(eval(expression, scope)) for expression in expressions]))
    results.flush()
    os._exit(0)


def main():
    limits, ready = json.loads(sys.argv[1]), int(sys.argv[2])
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    landlock_reads = [sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom", "/dev/zero"]
    quiet = ["/dev/null"]
    limit(limits)
    drop_capabilities()
    check(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    landlock(landlock_reads, [os.getcwd(), *quiet])
    seccomp()
    os.write(ready, b"1")
    os.close(ready)
    sys.argv = ["solution.py"]
    compiled = compile(source, "solution.py", "exec")
    if limits["calls"]:
        calls(compiled)
    exec(compiled, {"__name__": "__main__"})


main()
