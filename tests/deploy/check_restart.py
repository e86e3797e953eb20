#!/usr/bin/env python3
"""check_restart.py <mkerneld> <gemm_all_reduce>: a daemon is restarted, then killed, under a job of two nodes with two ranks each, as
systemd would do it (200 ms between the end and the next start). Within a second every rank has ended with an error that names
who is gone; in under two, a new rank has attached and computed. A machine that other work holds up gets three tries."""
import signal
import sys
import threading
import time

from cluster import Cluster, wait_for

ERROR_MAX_S, ATTACH_MAX_S, RESTART_PAUSE_S, TRIES = 1.0, 2.0, 0.2, 3
mkerneld, program = sys.argv[1:3]


class Rank:
    """One rank under load; notes when it ends, and with what words."""

    def __init__(self, cluster, job, rank):
        self.rank, self.process = rank, cluster.rank([program, "64", "64", "32", "600"], job, rank)
        self.thread = threading.Thread(target=self.wait)
        self.thread.start()

    def wait(self):
        self.words = self.process.communicate()[0]
        self.ended = time.monotonic()


def disturb(cluster, how, number, job):
    """Whether it went within the limits; what else is wrong fails."""
    ranks = [Rank(cluster, job, rank) for rank in range(4)]
    up = f"job '{job}' is up"

    def is_up():
        assert all(rank.process.poll() is None for rank in ranks)
        return all(up in cluster.log(node) for node in (0, 1))

    wait_for(is_up, f"job {job}")
    time.sleep(1)
    began = time.monotonic()
    cluster.daemons[0].send_signal(number)
    cluster.daemons[0].wait(timeout=30)
    time.sleep(RESTART_PAUSE_S)
    cluster.launch(0)
    cluster.await_ready(0)
    serving = time.monotonic() - began
    again = cluster.rank([program, "64", "64", "32"], f"after-{job}", 0, nodes=1, local=1)
    words = again.communicate()[0]
    attached = time.monotonic() - began
    for rank in ranks:
        rank.thread.join(timeout=30)
    errors = [rank.ended - began for rank in ranks]
    print(f"{how}: errors after {' '.join(f'{1000 * one:.0f}' for one in errors)} ms, serving again after {1000 * serving:.0f} ms, "
          f"a new rank done after {1000 * attached:.0f} ms")
    for rank, after in zip(ranks, errors):
        assert rank.process.returncode == 1, rank.words
        assert "mkerneld" in rank.words or "daemon" in rank.words or "node 0" in rank.words, f"rank {rank.rank} does not say who is gone: {rank.words}"
    assert again.returncode == 0, f"after {attached} s: {words}"
    return max(errors) < ERROR_MAX_S and attached < ATTACH_MAX_S


with Cluster(mkerneld) as nodes:
    for how, number in (("restart", signal.SIGTERM), ("kill", signal.SIGKILL)):
        within = any(disturb(nodes, how, number, f"{how}-{attempt}") for attempt in range(TRIES))
        assert within, f"{how}: never were all errors there within {ERROR_MAX_S} s and a new rank done within {ATTACH_MAX_S} s"
