"""Nodes on this machine, for examples, notebooks and tests: private daemons over loopback, no installation.

`local_cluster` starts one mkerneld per node in a temporary folder and stops them at the end; nobody else can
reach them. `LocalCluster.run` calls a function on every rank, each in a process of its own.

    python -m mkernel --nodes 2 --local 2 script.py [arguments]      runs a script on every rank
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any, Callable, Optional, Sequence

from . import _c, _with_parent
from ._lines import LineForwarder
from .errors import Error, ErrorCode, RankFailed, invalid
from .group import Place, shutdown

#: After a rank has failed, how long the others have to fail or to finish.
_GRACE_S = 30.0
_LINK = {"link_bandwidth": "--link-bandwidth", "link_latency": "--link-latency"}


def find_program(name: str) -> str:
    """mkerneld or mkctl: of $MKERNEL_BIN, the wheel mkernel-daemon, this checkout's build folder, or the system."""
    places: list[pathlib.Path] = []
    if os.environ.get("MKERNEL_BIN"):
        places.append(pathlib.Path(os.environ["MKERNEL_BIN"]))
    else:
        wheel = importlib.util.find_spec("mkernel_daemon")
        if wheel is not None and wheel.submodule_search_locations:
            places.append(pathlib.Path(next(iter(wheel.submodule_search_locations))) / "bin")
        for folder in _c.build_folders():
            places.extend([folder / "daemon", folder / "daemon" / name])
    for place in places:
        if (place / name).is_file():
            return str(place / name)
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin")
    if found is None:
        raise Error(
            ErrorCode.UNAVAILABLE,
            f"no {name} on this machine: install the wheel mkernel-daemon or the Debian package mkerneld, or set "
            "MKERNEL_BIN to the folder that has it",
        )
    return found


class LocalCluster:
    """Nodes of this machine; made by `local_cluster`, and stopped by `stop` or the end of the `with` block."""

    def __init__(self, nodes: int = 2, local: int = 2, **link: str) -> None:
        if nodes < 1 or local < 1:
            raise invalid(f"a cluster of {nodes} nodes with {local} ranks each: both must be 1 at least")
        unknown = set(link) - set(_LINK)
        if unknown:
            raise invalid(f"local_cluster knows no {', '.join(sorted(unknown))}; it knows nodes, local, {', '.join(_LINK)}")
        self.nodes, self.local, self.world = nodes, local, nodes * local
        self._jobs = 0
        self._owner = os.getpid()
        mkerneld = find_program("mkerneld")
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="mkernel-"))
        commands = []
        for node in range(nodes):
            command = [mkerneld, "--node-id", str(node), "--listen", self._peer(node), "--socket", self.socket(node)]
            command += ["--ready-file", str(self.folder / f"{node}.ready"), "--fabric", "loopback", "--log-format", "text"]
            command += [word for key, value in link.items() for word in (_LINK[key], value)]
            for other in range(nodes):
                command += ["--peer", f"{other}={self._peer(other)}"] if other != node else []
            commands.append(command)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MKERNELD_")}
        supervisor = str(pathlib.Path(__file__).with_name("_supervisor.py"))
        # In a session of its own: what kills this process's group leaves it, to end the daemons.
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", supervisor, str(self._owner), str(self.folder), *map(json.dumps, commands)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None
        said = self._supervisor.stdout.readline()
        answer: dict[str, Any] = json.loads(said) if said else {"failed": "their supervisor ended without a word"}
        if "failed" in answer:
            self.stop()
            raise Error(ErrorCode.UNAVAILABLE, f"the local cluster did not start: {answer['failed']}")
        #: The daemons' process ids, by node.
        self.daemons: list[int] = answer["ready"]

    def __repr__(self) -> str:
        state = "stopped" if self._supervisor.poll() is not None else str(self.folder)
        return f"<mkernel.LocalCluster of {self.nodes} nodes with {self.local} ranks each, {state}>"

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _peer(self, node: int) -> str:
        return f"unix:{self.folder}/{node}.peer"

    def socket(self, node: int) -> str:
        """The client socket of a node's daemon."""
        return f"{self.folder}/{node}.sock"

    def address(self, node: int) -> str:
        """The address of a node's daemon, for ``mkctl --address``."""
        return self._peer(node)

    def environment(self, rank: int, job: str) -> dict[str, str]:
        """The variables by which a process of that rank finds its daemon and its place."""
        place = Place.of_rank(rank, self.nodes, self.local)
        return {
            "MKERNEL_SOCKET": self.socket(place.node_rank),
            "MKERNEL_JOB": job,
            "MKERNEL_RANK": str(rank),
            "MKERNEL_WORLD_SIZE": str(self.world),
            "MKERNEL_LOCAL_RANK": str(place.local_rank),
            "MKERNEL_LOCAL_SIZE": str(self.local),
        }

    def stop(self) -> None:
        """Stops the daemons, and removes their folder. Idempotent; in a child of fork() of no effect."""
        if os.getpid() != self._owner:
            return
        if self._supervisor.stdin is not None and not self._supervisor.stdin.closed:
            self._supervisor.stdin.close()
        self._supervisor.wait()
        if self._supervisor.stdout is not None:
            self._supervisor.stdout.close()

    def __del__(self) -> None:
        if hasattr(self, "_supervisor"):
            self.stop()

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 300.0,
        start_method: Optional[str] = None,
    ) -> list[Any]:
        """Calls ``function(*arguments)`` on every rank, each in a process, and returns the answers by rank.

        The function calls `mkernel.init()` itself; what it left open is shut down when it returns. When a rank fails,
        dies, or is not done within `timeout` seconds, `RankFailed` says which and why, and the other processes are ended.

        Processes are spawned, so that the function must be importable; one defined in a notebook or a doctest is
        run in forked processes instead.
        """
        self._jobs += 1
        job = f"local-{self._jobs}"
        context = multiprocessing.get_context(start_method or ("spawn" if _importable(function) else "fork"))
        until = time.monotonic() + timeout * int(os.environ.get("MK_TEST_PATIENCE") or 1)
        processes, pipes = [], []
        try:
            for rank in range(self.world):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(  # type: ignore[attr-defined]
                    target=_rank_main, args=(theirs, os.getpid(), self.environment(rank, job), function, arguments), name=f"rank {rank}", daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(mine)
            return _collect(processes, pipes, until, timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()

    def run_script(self, arguments: Sequence[str], timeout: Optional[float] = None) -> None:
        """Runs ``python arguments...`` on every rank; the first that fails ends the others, and is a `RankFailed`.

        Output of the ranks appears as whole lines, as soon as they are written. The ranks end with this process.
        """
        self._jobs += 1
        processes = []
        lines = LineForwarder()
        until = None if timeout is None else time.monotonic() + timeout
        try:
            for rank in range(self.world):
                # To a pipe, Python would else write when it has much to say.
                environment = {"PYTHONUNBUFFERED": "1", **os.environ, **self.environment(rank, f"local-{self._jobs}")}
                out, err = lines.pipe(1), lines.pipe(2)
                try:
                    processes.append(subprocess.Popen(_with_parent.command(sys.executable, *arguments), env=environment, stdout=out, stderr=err))
                finally:
                    os.close(out)
                    os.close(err)
            lines.start()
            left = dict(enumerate(processes))
            failures: dict[int, str] = {}
            while left:
                for rank, process in list(left.items()):
                    status = process.poll()
                    if status is None:
                        continue
                    del left[rank]
                    if status != 0:
                        # The others have a moment to fail too: which of them was the first is not to be seen.
                        until = min(until or math.inf, time.monotonic() + 5.0)
                        failures[rank] = f"rank {rank} {_ended(status)}"
                if left and until is not None and time.monotonic() > until:
                    if not failures:
                        failures = {rank: f"rank {rank} was not done within {timeout:g} s" for rank in left}
                    break
                time.sleep(0.01)
            if failures:
                raise RankFailed(f"{arguments[0]}: {', '.join(failures.values())}", failures)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
            lines.close()


def local_cluster(nodes: int = 2, local: int = 2, **link: str) -> LocalCluster:
    """Starts `nodes` nodes on this machine, for `local` ranks each.

    ``link_bandwidth="2GB/s"`` and ``link_latency="5us"`` pace the network between them, which is otherwise as fast as memory.
    """
    return LocalCluster(nodes, local, **link)


def _importable(function: Any) -> bool:
    """Whether a new process can import the function by its name."""
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    if module is None or getattr(module, "__file__", None) is None:
        return False
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def _rank_main(pipe: Any, parent: int, environment: dict[str, str], function: Callable[..., Any], arguments: tuple) -> None:
    _with_parent.end_with(parent)
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        # Under PYTHONUNBUFFERED, pieces of a line would leave one by one, and other ranks write between them.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    try:
        answer: tuple = ("done", function(*arguments))
        shutdown()
    except BaseException as error:  # noqa: B902: an exit is a failure of the rank, too
        code = int(error.code) if isinstance(error, Error) else None
        answer = ("failed", "".join(traceback.format_exception(type(error), error, error.__traceback__)), code)
    try:
        pipe.send(answer)
    except Exception as error:
        pipe.send(("failed", f"the answer cannot be sent to the caller: {error}", None))
    pipe.close()


def _collect(processes: list, pipes: list, until: float, timeout: float) -> list[Any]:
    """The ranks' answers. After a failure the others have a moment to fail too: their words are then at hand."""
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    consequences: set[int] = set()
    left = dict(zip(pipes, range(len(pipes))))
    while left:
        ready = multiprocessing.connection.wait(list(left), max(0.0, until - time.monotonic()))
        if not ready:
            for rank in left.values():
                failures.setdefault(rank, f"rank {rank} was not done within {timeout:g} s")
            break
        pipe: Any
        for pipe in ready:
            rank = left.pop(pipe)
            answer: tuple
            try:
                answer = pipe.recv()
            except EOFError:
                processes[rank].join()
                answer = ("failed", f"rank {rank}'s process {_ended(processes[rank].exitcode)}", None)
            if answer[0] == "done":
                answers[rank] = answer[1]
                continue
            if not failures:
                until = min(until, time.monotonic() + _GRACE_S)
            failures[rank] = answer[1]
            if answer[2] in (ErrorCode.PEER_LOST, ErrorCode.ABORTED):
                consequences.add(rank)
    if failures:
        first = next((rank for rank in failures if rank not in consequences), next(iter(failures)))
        others = [rank for rank in failures if rank != first]
        more = f"\n(also failed: ranks {', '.join(map(str, sorted(others)))})" if others else ""
        raise RankFailed(f"rank {first} failed: {failures[first].rstrip()}{more}", failures, answers)
    return [answers[rank] for rank in range(len(pipes))]


def _ended(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"was ended by signal {-status}"
