"""Daemons and ranks of this machine, for the tests that are scripts. Everything lies in one folder; nothing has a fixed port."""
import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

PATIENCE_S = 60
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def end_with_parent():
    """In a process that is about to be a daemon or a rank: a test that is killed leaves none of them."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for(done, what, patience=PATIENCE_S, pause=0.02):
    """What `done` answers first that is true."""
    until = time.monotonic() + patience
    while not (answer := done()):
        assert time.monotonic() < until, f"{what}: not within {patience} s"
        time.sleep(pause)
    return answer


class Cluster:
    """Nodes 0 and up, each with a configuration file; all processes end with the `with` block. `mkerneld`: the program, or one per node."""

    def __init__(self, mkerneld="mkerneld", nodes=2, more=lambda node: "", environment=None):
        self.mkerneld, self.nodes, self.environment = mkerneld, nodes, environment or dict(os.environ)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="mk-nodes-"))
        self.daemons, self.processes = {}, []
        for node in range(nodes):
            (self.folder / f"{node}").mkdir()
            peers = "".join(f'[[peer]]\nid = {other}\naddress = "{self.address(other)}"\n' for other in range(nodes) if other != node)
            (self.folder / f"{node}/mkerneld.toml").write_text(
                f'node_id = {node}\nlisten = "{self.address(node)}"\n[socket]\npath = "{self.socket(node)}"\n{peers}{more(node)}')
        (self.folder / "nodes").write_text("".join(f"{self.address(node)}\n" for node in range(nodes)))

    def __enter__(self):
        try:
            for node in range(self.nodes):
                self.launch(node)
            for node in range(self.nodes):
                self.await_ready(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        processes = [*self.processes, *self.daemons.values()]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        shutil.rmtree(self.folder)

    def address(self, node):
        return f"unix:{self.folder}/{node}/peer"

    def socket(self, node):
        return f"{self.folder}/{node}/sock"

    def log(self, node):
        return (self.folder / f"{node}/log").read_text()

    def launch(self, node):
        (self.folder / f"{node}/ready").unlink(missing_ok=True)
        with open(self.folder / f"{node}/log", "a") as log:
            self.daemons[node] = subprocess.Popen(
                [self.mkerneld if isinstance(self.mkerneld, str) else self.mkerneld[node], "--config", self.folder / f"{node}/mkerneld.toml", "--ready-file", self.folder / f"{node}/ready"],
                env=self.environment, stderr=log, preexec_fn=end_with_parent)

    def await_ready(self, node):
        def ready():
            assert self.daemons[node].poll() is None, self.log(node)
            return (self.folder / f"{node}/ready").exists()

        wait_for(ready, f"the daemon of node {node}", pause=0.005)

    def rank(self, command, job, rank, nodes=2, local=2):
        """A process of that job, its rank's place in its environment; what it says is on its stdout."""
        node = rank // local
        environment = {**self.environment, "MKERNEL_SOCKET": self.socket(node), "MKERNEL_JOB": job, "MKERNEL_RANK": str(rank),
                       "MKERNEL_WORLD_SIZE": str(nodes * local), "MKERNEL_LOCAL_RANK": str(rank % local),
                       "MKERNEL_LOCAL_SIZE": str(local)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   preexec_fn=end_with_parent)
        self.processes.append(process)
        return process


def moving_job(cluster, environment):
    """Starts a job of one rank on each of two nodes that goes on, and answers its name when it moves."""
    job = subprocess.Popen(
        ["mkbench", "gemm-ar", "--join", cluster.socket(0), cluster.socket(1), "--local", "1", "--m", "256", "--n", "256", "--k", "256",
         "--iters", "100000", "--verify", "none"], env=environment, stdout=open(cluster.folder / "job.log", "w"), stderr=subprocess.STDOUT)
    cluster.processes.append(job)

    def moving():
        assert job.poll() is None, (cluster.folder / "job.log").read_text()
        seen = subprocess.run(["mkctl", "--json", "job", "list"], env=environment, text=True, capture_output=True)
        return [one for one in json.loads(seen.stdout)["jobs"] if one["state"] == "up" and one["commands"] > 0]

    return wait_for(moving, "the job")[0]["job"]
