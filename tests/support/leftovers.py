"""Finds what a test session left behind: live processes, stale socket files, entries of /dev/shm.

Several sessions may run side by side on one machine, so everything is told apart by owner: a
process belongs to the session whose token its environment carries or whose descendant it is; an
entry that a foreign live process holds is that process's business.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOKEN_VARIABLE = "HMA_TEST_SESSION"
SHM = Path("/dev/shm")
# What engines and their workers name in /dev/shm; a killed one leaves it to whoever killed it.
SHM_OF_ENGINES = ("vllm_", "psm_", "sem.mp-")
# vLLM's own sockets, named by a UUID in the temporary folder; one that is killed leaves them.
_OF_THE_ENGINE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SOCKET_DEPTH = 3
# Helpers of the interpreter that end with it, by design.
_OF_THE_INTERPRETER = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Names that were there before the session began."""

    shm: frozenset[str]
    sockets: frozenset[str]


def take_snapshot() -> Snapshot:
    """What is there now."""
    return Snapshot(frozenset(_shm_names()), frozenset(_stale_sockets()))


def find_leftovers(
    before: Snapshot, token: str, grace_s: float = 10.0, foreign_shm: tuple[str, ...] = ()
) -> list[str]:
    """One line per thing that this session left behind and that is still there after `grace_s`.

    `foreign_shm`: beginnings of names in /dev/shm that only other sessions make.
    """
    deadline = time.monotonic() + grace_s
    while True:
        found = [
            *(f"process {pid}: {_command_line(pid)}" for pid in session_processes(token)),
            *(
                f"/dev/shm/{name}"
                for name in _shm_of_session(before, token)
                if not name.startswith(foreign_shm)
            ),
            *(f"socket {path}" for path in sorted(set(_stale_sockets()) - before.sockets)),
        ]
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.1)


def session_processes(token: str) -> list[int]:
    """Ids of live processes started by this one, directly or not, but the interpreter's helpers."""
    me = os.getpid()
    parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
    marker = f"{TOKEN_VARIABLE}={token}".encode()
    return [
        pid
        for pid in sorted(parents)
        if pid != me
        and (_descends(pid, me, parents) or marker in _read(pid, "environ").split(b"\0"))
        and not any(helper in _read(pid, "cmdline") for helper in _OF_THE_INTERPRETER)
    ]


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    seen: set[int] = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int | None:
    """Parent id of a live process; None for one that is gone or a zombie."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return None if len(fields) < 2 or fields[0] in (b"Z", b"X") else int(fields[1])


def _command_line(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()[:200]


def _shm_names() -> list[str]:
    return os.listdir(SHM) if SHM.is_dir() else []


def _shm_of_session(before: Snapshot, token: str) -> list[str]:
    names = sorted(set(_shm_names()) - before.shm)
    if not names:
        return []
    ours = {os.getpid(), *session_processes(token)}
    foreign = [pid for pid in _pids() if pid not in ours]
    return [name for name in names if not any(_holds(pid, f"{SHM}/{name}") for pid in foreign)]


def _holds(pid: int, path: str) -> bool:
    if path.encode() in _read(pid, "maps"):
        return True
    try:
        return any(os.readlink(entry) == path for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _stale_sockets() -> list[str]:
    """Socket files under the session's temporary folder that no live process has bound."""
    bound = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    return [path for path in _sockets(tempfile.gettempdir(), _SOCKET_DEPTH) if path not in bound]


def _sockets(folder: str, depth: int) -> Iterator[str]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            mode = entry.stat(follow_symlinks=False).st_mode
        except OSError:
            continue
        if stat.S_ISSOCK(mode) and not _OF_THE_ENGINE.fullmatch(entry.name):
            yield entry.path
        elif stat.S_ISDIR(mode) and depth > 1:
            yield from _sockets(entry.path, depth - 1)
