#!/usr/bin/env python3
"""check_restart.py <mkerneld> <gemm_all_reduce>: a daemon is restarted, then killed, under a job of two nodes with two ranks each, as
systemd would do it (200 ms between the end and the next start). Within a second every rank has ended with an error that names
who is gone; in under two, a new rank has attached and computed."""
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ERROR_MAX_S, ATTACH_MAX_S, RESTART_PAUSE_S = 1.0, 2.0, 0.2
mkerneld, program = sys.argv[1:3]
folder = pathlib.Path(tempfile.mkdtemp(prefix="mkernel-restart-"))
daemons = {}


def start_daemon(node):
    ready = folder / f"{node}.ready"
    ready.unlink(missing_ok=True)
    with open(folder / f"{node}.log", "a") as log:
        daemons[node] = subprocess.Popen(
            [mkerneld, "--node-id", str(node), "--listen", f"unix:{folder}/{node}.peer", "--socket", f"{folder}/{node}.sock",
             "--peer", f"{1 - node}=unix:{folder}/{1 - node}.peer", "--ready-file", ready], stderr=log)
    while not ready.exists():
        assert daemons[node].poll() is None, (folder / f"{node}.log").read_text()
        time.sleep(0.005)


def start_rank(job, rank, nodes, local, *arguments):
    node = rank // local
    environment = {**os.environ, "MKERNEL_SOCKET": f"{folder}/{node}.sock", "MKERNEL_JOB": job, "MKERNEL_RANK": str(rank),
                   "MKERNEL_WORLD_SIZE": str(nodes * local), "MKERNEL_LOCAL_RANK": str(rank % local),
                   "MKERNEL_LOCAL_SIZE": str(local)}
    return subprocess.Popen([program, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class Rank:
    """One rank under load; notes when it ends, and with what words."""

    def __init__(self, job, rank):
        self.rank, self.process = rank, start_rank(job, rank, 2, 2, "64", "64", "32", "600")
        self.thread = threading.Thread(target=self.wait)
        self.thread.start()

    def wait(self):
        self.words = self.process.communicate()[0]
        self.ended = time.monotonic()


def disturb(how, number):
    ranks = [Rank(how, rank) for rank in range(4)]
    end = time.monotonic() + 60
    up = f"job '{how}' is up"
    while not all(up in (folder / f"{node}.log").read_text() for node in (0, 1)):
        assert time.monotonic() < end and all(rank.process.poll() is None for rank in ranks)
        time.sleep(0.05)
    time.sleep(1)
    began = time.monotonic()
    daemons[0].send_signal(number)
    daemons[0].wait(timeout=30)
    time.sleep(RESTART_PAUSE_S)
    start_daemon(0)
    serving = time.monotonic() - began
    again = start_rank(f"after-{how}", 0, 1, 1, "64", "64", "32")
    words = again.communicate()[0]
    attached = time.monotonic() - began
    for rank in ranks:
        rank.thread.join(timeout=30)
    errors = [rank.ended - began for rank in ranks]
    print(f"{how}: errors after {' '.join(f'{1000 * one:.0f}' for one in errors)} ms, serving again after {1000 * serving:.0f} ms, "
          f"a new rank done after {1000 * attached:.0f} ms")
    for rank, after in zip(ranks, errors):
        assert rank.process.returncode == 1, rank.words
        assert after < ERROR_MAX_S, f"rank {rank.rank} ended after {after} s: {rank.words}"
        assert "mkerneld" in rank.words or "daemon" in rank.words or "node 0" in rank.words, f"rank {rank.rank} does not say who is gone: {rank.words}"
    assert again.returncode == 0 and attached < ATTACH_MAX_S, f"after {attached} s: {words}"


try:
    for node in (0, 1):
        start_daemon(node)
    disturb("restart", signal.SIGTERM)
    disturb("kill", signal.SIGKILL)
finally:
    for daemon in daemons.values():
        daemon.kill()
        daemon.wait()
    shutil.rmtree(folder)
