#!/usr/bin/env python3
"""check_messages.py <mkerneld> <mkctl>: what a daemon says of mistakes that a new administrator makes names the cause and the remedy."""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

mkerneld, mkctl = sys.argv[1:]
PATIENCE_S = 60


def configure(folder, configuration):
    (folder / "mk.toml").write_text(f'listen = "unix:{folder}/peer"\n[socket]\npath = "{folder}/sock"\n{configuration}')


def waiting(folder, configuration):
    """The log of a daemon until it waits for what is not there; then it is stopped."""
    configure(folder, configuration)
    with subprocess.Popen([mkerneld, "--config", folder / "mk.toml", "--log-format", "text"], stderr=subprocess.PIPE, text=True) as daemon:
        log = ""
        for line in daemon.stderr:
            log += line
            if "waiting: " in line:
                daemon.terminate()
        assert daemon.wait(PATIENCE_S) == 0, log
    return log


def refused(folder, configuration, environment):
    """The log of a daemon that does not start."""
    configure(folder, configuration)
    done = subprocess.run([mkerneld, "--config", folder / "mk.toml", "--log-format", "text"], env={**os.environ, **environment},
                          capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1, f"ended with {done.returncode}:\n{done.stderr}"
    return done.stderr


def says(text, *patterns):
    for pattern in patterns:
        assert re.search(pattern, text), f"'{pattern}' is not in:\n{text}"


def of_libfabric(folder):
    if not has_ofi():
        return
    says(refused(folder, '[fabric]\nname = "ofi"\n', {"FI_PROVIDER": "shm"}), r"FI_PROVIDER=shm in the environment hides .*'tcp': unset it")
    says(waiting(folder, '[fabric]\nname = "ofi"\n[fabric.ofi]\nbind = ["eth77"]\n'), r"waiting: .*no interface or address 'eth77' here; there are: .*\blo\b")


def has_ofi():
    seen = subprocess.run([mkerneld, "--doctor", "--json"], capture_output=True, text=True, timeout=PATIENCE_S)
    return any(check["id"] == "ofi.version" and check["result"] != "SKIP" for check in json.loads(seen.stdout)["checks"])


def of_fabrics_that_differ(folder):
    daemons, logs = [], [folder / "log0", folder / "log1"]
    try:
        for node, fabric in enumerate(("loopback", "null")):
            daemons.append(subprocess.Popen(
                [mkerneld, "--node-id", str(node), "--listen", f"unix:{folder}/p{node}", "--socket", f"{folder}/c{node}", "--peer",
                 f"{1 - node}=unix:{folder}/p{1 - node}", "--fabric", fabric, "--log-format", "text"], stderr=open(logs[node], "w")))

        def status():
            seen = subprocess.run([mkctl, "--address", f"unix:{folder}/p0", "--json", "status"], capture_output=True, text=True)
            return json.loads(seen.stdout) if seen.returncode in (0, 1) and seen.stdout.strip() else {"peers": []}

        # It has called at least three times.
        end = time.monotonic() + PATIENCE_S
        while not (peers := status()["peers"]) or int(peers[0]["breaks"]) < 3:
            assert time.monotonic() < end, f"{peers}\n{logs[0].read_text()}"
            time.sleep(0.2)
        says("\n".join(status()["problems"]), r"waiting for node 1 \(.*\) to connect: it has the higher id.*fabric 'null' and this daemon 'loopback'")
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait()
    for log, other in zip(logs, (1, 0)):
        lines = re.findall(r".*disconnected.*", log.read_text())
        assert len(lines) == 1, f"once, not with every call:\n{log.read_text()}"
        says(lines[0], rf"disconnected node {other} \(.*\): it has the fabric '\w+' and this daemon '\w+'; configure the same on all nodes")


for case in (of_libfabric, of_fabrics_that_differ):
    with tempfile.TemporaryDirectory(prefix="mk-messages-") as name:
        case(pathlib.Path(name))
    print(f"passed: {case.__name__}")
