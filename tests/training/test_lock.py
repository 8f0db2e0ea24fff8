"""One run, one process: live locks refuse, dead ones do not, also of another machine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from blockdiff.training.lock import NAME, RunLock, RunLockedError, one_at_a_time

HOLD = """
import sys, time
from pathlib import Path
from blockdiff.training.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def foreign(directory: Path) -> Path:
    path = directory / NAME
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": "then"}) + "\n", encoding="utf-8")
    return path


def test_a_second_process_is_refused_and_a_killed_one_forgotten(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunLockedError, match=rf"in use by process {holder.pid} on .*name="), RunLock(tmp_path):
            pass
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert (tmp_path / NAME).read_text(encoding="utf-8")
    with RunLock(tmp_path):
        pass
    assert (tmp_path / NAME).read_text(encoding="utf-8") == ""


def test_the_lock_names_its_owner(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        owner = json.loads((tmp_path / NAME).read_text(encoding="utf-8"))
    assert owner["pid"] == os.getpid()
    assert owner.keys() == {"host", "pid", "started"}


def test_a_beating_owner_on_another_machine_is_respected(tmp_path: Path) -> None:
    path = foreign(tmp_path)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.02):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunLockedError, match="process 7 on elsewhere, started then"):
            RunLock(tmp_path, beat_seconds=0.2).__enter__()
    finally:
        stop.set()
        thread.join()


def test_a_silent_owner_on_another_machine_is_dead(tmp_path: Path) -> None:
    foreign(tmp_path)
    with RunLock(tmp_path, beat_seconds=0.05):
        assert json.loads((tmp_path / NAME).read_text(encoding="utf-8"))["pid"] == os.getpid()


def test_the_holder_beats(tmp_path: Path) -> None:
    with RunLock(tmp_path, beat_seconds=0.02):
        before = (tmp_path / NAME).stat().st_mtime_ns
        deadline = time.monotonic() + 10
        while (tmp_path / NAME).stat().st_mtime_ns == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / NAME).stat().st_mtime_ns > before


def test_processes_go_through_one_by_one(tmp_path: Path) -> None:
    inside, most = [], []

    def go() -> None:
        with one_at_a_time(tmp_path / "new"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_a_directory_that_cannot_be_locked_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    entered = False
    with one_at_a_time(tmp_path / "file" / "below"):
        entered = True
    assert entered


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Of a data loader: it may outlive its killed parent by seconds."""
    lock = RunLock(tmp_path)
    lock.__enter__()
    heard, said = os.pipe()
    child = os.fork()
    if not child:
        os.write(said, b"here")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(heard, 4) == b"here"
        lock.__exit__()
        with RunLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
