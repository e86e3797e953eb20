"""Keeps the daemons of a local cluster: starts them, and ends them when its input or the cluster's process ends.

    python -I _supervisor.py OWNER FOLDER COMMAND...     OWNER: the cluster's process; each COMMAND a JSON list

The other end of the input is the cluster's process's; children that it forked may hold it longer, so that the process
itself is watched, too. When this supervisor is killed, the kernel kills the daemons. What it prints: "ready", or
"failed" and the reason, as one line of JSON.
"""

import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parent))  # -I leaves it out
from _with_parent import command as with_parent


def main(owner, folder, commands):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the cluster's process's affair
    folder = pathlib.Path(folder)
    daemons = []
    try:
        for node, command in enumerate(commands):
            with open(folder / f"{node}.log", "wb") as log:
                daemons.append(subprocess.Popen(with_parent(*command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True))
        print(json.dumps(await_ready(folder, daemons)), flush=True)
        await_end(owner)
    except FileNotFoundError as error:
        print(json.dumps({"failed": str(error)}), flush=True)
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def await_end(owner):
    watched = [sys.stdin.fileno()]
    try:
        watched.append(os.pidfd_open(owner))
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # an old Python or kernel: the input alone
        pass
    if os.getppid() == owner:
        select.select(watched, [], [])


def await_ready(folder, daemons, patience_s=60):
    until = time.monotonic() + patience_s * int(os.environ.get("MK_TEST_PATIENCE") or 1)
    while True:
        for node, daemon in enumerate(daemons):
            if daemon.poll() is not None:
                said = (folder / f"{node}.log").read_text(errors="replace")[-2000:]
                return {"failed": f"the daemon of node {node} ended with {daemon.returncode}: {said}"}
        if all((folder / f"{node}.ready").exists() for node in range(len(daemons))):
            return {"ready": [daemon.pid for daemon in daemons]}
        if time.monotonic() > until:
            return {"failed": f"the daemons were not ready within {patience_s} s"}
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], [json.loads(command) for command in sys.argv[3:]])
