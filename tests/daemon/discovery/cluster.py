"""A small cluster on loopback addresses, for the discovery tests: daemons, jobs over them, and what mkctl says of them.
Everything that is started ends with the `Cluster`."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "runner"))
from free_ports import free_ports  # noqa: E402


def free_port(host="127.0.0.1"):
    return free_ports(1, host)[0]


def eventually(what, done, seconds=60):
    """Waits until `done()` is true; fails naming `what`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if done():
            return
        time.sleep(0.05)
    raise AssertionError(f"never: {what}")


def need(program, package):
    if not shutil.which(program):
        print(f"{program} is missing (Debian: {package})")
        sys.exit(77)


def certificate(folder, name, authority=None, names="IP:127.0.0.1,DNS:localhost"):
    """name.crt and name.key, made out to `names`; its own authority when there is none."""
    subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={names}"]
    signed = ["-CA", folder / f"{authority}.crt", "-CAkey", folder / f"{authority}.key"] if authority else []
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject, *signed,
                    "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"], check=True, capture_output=True)


class Cluster:
    def __init__(self, mkerneld, mkctl, mkbench):
        self.mkerneld, self.mkctl, self.mkbench = mkerneld, mkctl, mkbench
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="mkernel-discovery-"))
        self.programs = {}
        self.addresses = {}
        self.folders = [self.folder]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is not None:
            for log in sorted(self.folder.glob("*.log")):
                print(f"-- {log.name}:\n" + "".join(log.read_text().splitlines(True)[-12:]))
        for program in self.programs.values():
            program.kill()
        for program in self.programs.values():
            program.wait()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def start(self, name, *command):
        """Any program, its output in <name>.log."""
        with open(self.folder / f"{name}.log", "a") as log:
            self.programs[name] = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)

    def stop(self, name, number=signal.SIGTERM):
        program = self.programs.pop(name)
        program.send_signal(number)
        program.wait(timeout=30)

    def start_node(self, node, address, discovery, name=None):
        """A daemon that listens at `address` and knows of nobody."""
        name = name or f"node{node}"
        config, ready = self.folder / f"{name}.toml", self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        config.write_text(
            f'node_id = {node}\nlisten = "{address}"\n[socket]\npath = "{self.folder}/{name}.sock"\n'
            f'[admin]\nsocket = "{self.folder}/{name}.admin"\n[limits]\ndrain = "0s"\n{discovery}')
        self.addresses[node] = address
        self.start(name, self.mkerneld, "--config", config, "--ready-file", ready)
        eventually(f"{name} is ready", ready.exists)

    def status(self, node):
        asked = subprocess.run([self.mkctl, "--address", self.addresses[node], "--json", "status"],
                               capture_output=True, text=True)
        return json.loads(asked.stdout) if asked.stdout.strip() else {}

    def peers_up(self, node):
        return {peer["node"] for peer in self.status(node).get("peers", []) if peer["state"] == "up"}

    def peers(self, node):
        return {peer["node"] for peer in self.status(node).get("peers", [])}

    def reason(self, node, peer):
        """Why `node` is not connected with `peer`; empty where it is, or does not know it."""
        return "".join(one.get("reason", "") for one in self.status(node).get("peers", []) if one["node"] == peer)

    def expect_cluster(self, *nodes, seconds=60):
        """Every one of the nodes knows exactly the others, and is connected with them."""
        for node in nodes:
            others = set(nodes) - {node}
            eventually(f"node {node} is connected with {others}, and knows nobody else",
                       lambda: self.peers_up(node) == others == self.peers(node), seconds)

    def run_job(self, *nodes):
        """A job with a rank on each node, every element checked."""
        sockets = [f"{self.folder}/node{node}.sock" for node in nodes]
        ran = subprocess.run(
            [self.mkbench, "gemm-ar", "--join", *sockets, "--nodes", str(len(nodes)), "--local", "1", "--m", "64", "--n", "64", "--k", "64",
             "--warmup", "0", "--iters", "2", "--verify", "all"],
            capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def problem(self, node, text):
        eventually(f"node {node} says '{text}'",
                   lambda: any(text in one for one in self.status(node).get("problems", [])))

    def doctor(self, node):
        """What the doctor says of the other nodes, beside this one's daemon: "PASS" or the like, and what it saw."""
        asked = subprocess.run([self.mkctl, "--config", self.folder / f"node{node}.toml", "--json", "doctor"],
                               capture_output=True, text=True)
        (found,) = [one for one in json.loads(asked.stdout)["checks"] if one["id"] == "peers.reachable"]
        return f'{found["result"]} {found["evidence"]}'

    def healthy(self, node):
        eventually(f"node {node} is well", lambda: self.status(node).get("health") == "ok")
