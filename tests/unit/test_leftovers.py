"""The check for things left behind sees what it is there to see, and nobody else's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from support.leftovers import TOKEN_VARIABLE, find_leftovers, session_processes, take_snapshot


@pytest.fixture
def token() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def orphan(token: str) -> Iterator[int]:
    """A process in its own session whose parent has ended."""
    sleeper = "import subprocess as s, sys; p = s.Popen([sys.executable, '-c', "
    sleeper += "'import time; time.sleep(600)'], start_new_session=True, stdout=s.DEVNULL); "
    sleeper += "print(p.pid)"
    made = subprocess.run(
        [sys.executable, "-c", sleeper],
        env=os.environ | {TOKEN_VARIABLE: token},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    pid = int(made.stdout)
    yield pid
    os.kill(pid, signal.SIGKILL)


def test_an_orphan_is_found_by_its_environment(orphan: int, token: str) -> None:
    assert orphan in session_processes(token)
    assert any(f"process {orphan}" in line for line in find_leftovers(take_snapshot(), token, 0))


def test_an_orphan_of_another_session_is_not_ours(orphan: int) -> None:
    assert orphan not in session_processes(uuid.uuid4().hex)


def test_a_child_is_found_until_it_ends(token: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in session_processes(token)
        child.communicate(b"\n")
    assert child.pid not in session_processes(token)


def test_shared_memory_that_stays_is_found_and_unlinked_is_not(token: str) -> None:
    before = take_snapshot()
    segment = SharedMemory(create=True, size=64)
    try:
        assert f"/dev/shm/{segment.name}" in find_leftovers(before, token, 0)
    finally:
        segment.close()
        segment.unlink()
    assert f"/dev/shm/{segment.name}" not in find_leftovers(before, token, 0)


def test_shared_memory_held_by_a_foreign_process_is_not_ours() -> None:
    before = take_snapshot()
    name = f"hma-test-{uuid.uuid4().hex}"
    hold = f"f = open('/dev/shm/{name}', 'wb'); print('made', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        # Seen from a process that is no ancestor of the holder.
        look = "from support.leftovers import *; import sys; "
        look += "print(find_leftovers(Snapshot(frozenset(sys.argv[1:]), frozenset()), 'x', 0))"
        args = [sys.executable, "-c", look, *before.shm]
        path = str(Path(__file__).parents[1])
        env = os.environ | {"PYTHONPATH": path}
        seen = subprocess.run(args, env=env, capture_output=True, text=True)
        assert name not in seen.stdout, seen.stderr
        assert seen.returncode == 0, seen.stderr
        holder.communicate(b"\n")
    left = find_leftovers(before, "x", 0)
    os.unlink(f"/dev/shm/{name}")
    assert f"/dev/shm/{name}" in left


def test_a_socket_file_counts_once_nobody_has_it_bound(token: str) -> None:
    before = take_snapshot()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path)
            assert f"socket {path}" not in find_leftovers(before, token, 0)
        assert f"socket {path}" in find_leftovers(before, token, 0)


def test_it_waits_for_what_is_about_to_go(token: str) -> None:
    before = take_snapshot()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"]) as child:
        left = find_leftovers(before, token, 30)
    assert not any(f"process {child.pid}:" in line for line in left)
