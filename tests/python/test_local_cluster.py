"""Nodes of this machine: they start and end as they should, and tell which rank failed."""
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import on_ranks
import pytest

import mkernel
from mkernel import local

PACKAGE = pathlib.Path(mkernel.__file__).resolve().parents[1]
PATIENCE_S = 30 * int(os.environ.get("MK_TEST_PATIENCE") or 1)


def await_end(processes):
    until = time.monotonic() + PATIENCE_S
    while any(pathlib.Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < until, f"{processes} go on"
        time.sleep(0.02)


def test_a_rank_that_raises_is_named_with_its_traceback(cluster):
    with pytest.raises(mkernel.RankFailed, match="rank 2 failed") as failed:
        cluster.run(on_ranks.raises_on, 2)
    assert "as the test wants" in str(failed.value) and "raises_on" in failed.value.failures[2]


def test_a_rank_that_does_not_return_is_named_when_time_is_up(cluster):
    with pytest.raises(mkernel.RankFailed, match="was not done within 2 s") as failed:
        cluster.run(on_ranks.sleeps_on, 1, timeout=2)
    assert failed.value.failures[1] == "rank 1 was not done within 2 s"


def test_the_daemons_and_their_folder_go_with_the_block():
    with mkernel.local_cluster(nodes=1, local=1) as cluster:
        folder, daemons = cluster.folder, cluster.daemons
        assert folder.exists() and len(daemons) == 1
        assert repr(cluster) == f"<mkernel.LocalCluster of 1 nodes with 1 ranks each, {folder}>"
    await_end(daemons)
    assert not folder.exists() and repr(cluster).endswith("stopped>")


OWNER = """
import mkernel, os, time
cluster = mkernel.local_cluster(2, 1)
print(cluster.folder, cluster._supervisor.pid, *cluster.daemons, flush=True)
if {forks} and os.fork() == 0:  # as loaders of data do; it holds every pipe of its parent
    print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["owner", "group", "supervisor", "owner of a fork"])
def test_the_daemons_end_when_their_process_is_killed(killed):
    program = OWNER.format(forks=killed == "owner of a fork")
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        start_new_session=True,
    ) as owner:
        folder, supervisor, *daemons = owner.stdout.readline().split()
        child = int(owner.stdout.readline()) if killed == "owner of a fork" else None
        try:
            if killed == "supervisor":
                os.kill(int(supervisor), signal.SIGKILL)
            elif killed == "group":
                os.killpg(owner.pid, signal.SIGKILL)
            else:
                owner.send_signal(signal.SIGKILL)
            await_end([int(daemon) for daemon in daemons])
        finally:
            if child is not None:
                os.kill(child, signal.SIGKILL)
            owner.kill()
    until = time.monotonic() + PATIENCE_S
    while killed != "supervisor" and pathlib.Path(folder).exists():
        assert time.monotonic() < until, f"{folder} stays"
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_daemon_that_cannot_start_is_quoted():
    with pytest.raises(mkernel.Error, match="did not start.*link-bandwidth"):
        mkernel.local_cluster(1, 1, link_bandwidth="much")


def test_wrong_arguments_are_refused():
    with pytest.raises(mkernel.Error, match="0 nodes"):
        mkernel.local_cluster(0, 1)
    with pytest.raises(mkernel.Error, match="knows no speed"):
        mkernel.local_cluster(1, 1, speed="1GB/s")


def test_a_missing_daemon_program_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("MKERNEL_BIN", str(tmp_path))
    monkeypatch.setattr(local.shutil, "which", lambda *_, **__: None)
    with pytest.raises(mkernel.Error, match="no mkerneld on this machine.*mkernel-daemon"):
        local.find_program("mkerneld")


SCRIPT = """
import sys, numpy, mkernel
group = mkernel.init()
if group.rank == int(sys.argv[1]):
    sys.exit(3)
group.barrier()
with open(f"{sys.argv[2]}/{group.rank}", "w") as out:
    out.write(repr(group))
"""


def run_command(folder, failing):
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mkernel", "--nodes", "2", "--local", "1", str(folder / "script.py"), str(failing), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S, env={**os.environ, "PYTHONPATH": str(PACKAGE)})


def test_the_command_runs_a_script_on_every_rank(tmp_path):
    done = run_command(tmp_path, -1)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "1").read_text() == "<mkernel.Group 'default': rank 1 of 2, 2 nodes, loopback>"


def test_the_command_names_the_rank_that_failed(tmp_path):
    done = run_command(tmp_path, 1)
    assert done.returncode == 1 and "rank 1 ended with status 3" in done.stderr


TALK = """
import os, sys, time
rank = os.environ["MKERNEL_RANK"]
for i in range(200):
    for piece in ("line", " ", str(i), " of rank ", rank, "\\n"):
        os.write(1 + i % 2, piece.encode())
print("the end of rank", rank, end="")
"""


def test_ranks_do_not_write_within_each_others_lines(tmp_path):
    """However small the pieces are that they write, to either stream; also a last line without an end."""
    (tmp_path / "talk.py").write_text(TALK)
    command = [sys.executable, "-m", "mkernel", "--nodes", "1", "--local", "3", str(tmp_path / "talk.py")]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stderr
    out = [f"line {i} of rank {rank}" for i in range(0, 200, 2) for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == sorted(out + [f"the end of rank {rank}" for rank in range(3)])
    assert sorted(done.stderr.splitlines()) == sorted(f"line {i} of rank {rank}" for i in range(1, 200, 2) for rank in range(3))


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_rank_is_heard_while_it_runs_and_ends_with_its_launcher(tmp_path, end):
    (tmp_path / "wait.py").write_text("import os, time\nprint(os.getpid())\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "mkernel", "--nodes", "1", "--local", "1", str(tmp_path / "wait.py")]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    environment.pop("PYTHONUNBUFFERED", None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as ranks:
        rank = int(ranks.stdout.readline())
        ranks.send_signal(end)
        assert ranks.wait(PATIENCE_S) != 0
    await_end([rank])


@pytest.mark.parametrize("way", ["run", "run_script"])
def test_ranks_end_with_a_program_that_is_killed(tmp_path, way):
    """No handler of the program's sees SIGKILL: the kernel ends the ranks."""
    (tmp_path / "wait.py").write_text("import os, time\ndef wait():\n    print(os.getpid(), flush=True)\n    time.sleep(600)\nif __name__ == '__main__':\n    wait()\n")
    call = {"run": "run(wait.wait)", "run_script": f"run_script([{str(tmp_path / 'wait.py')!r}])"}[way]
    (tmp_path / "program.py").write_text(f"import mkernel, wait\nif __name__ == '__main__':\n    mkernel.local_cluster(1, 2).{call}\n")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    with subprocess.Popen([sys.executable, str(tmp_path / "program.py")], stdout=subprocess.PIPE, env=environment) as program:
        ranks = [int(program.stdout.readline()) for _ in range(2)]
        program.send_signal(signal.SIGKILL)
        program.stdout.close()
    await_end(ranks)


def test_functions_do_not_write_within_each_others_lines(tmp_path):
    program = f"import sys\nsys.path[:0] = {[str(PACKAGE), str(pathlib.Path(on_ranks.__file__).parent)]}\nimport mkernel, on_ranks\n"
    program += "if __name__ == '__main__':\n    with mkernel.local_cluster(1, 3) as cluster:\n        cluster.run(on_ranks.talks, 1000)\n"
    (tmp_path / "functions.py").write_text(program)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, str(tmp_path / "functions.py")], capture_output=True, text=True, timeout=4 * PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"line {i} of rank {rank}" for i in range(1000) for rank in range(3))
