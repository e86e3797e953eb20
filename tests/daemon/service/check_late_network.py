#!/usr/bin/env python3
"""check_late_network.py <mkerneld> <mkctl>: a daemon that starts before its network waits for it, says for what, and is ready when the
network is there. It runs in a network namespace of its own, whose loopback interface gets the address later."""
import fcntl
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

PATIENCE_S = 60
ADDRESS = "192.0.2.77"  # for documentation (RFC 5737)
METRICS = "127.0.0.1:9464"  # the namespace has no other user of it
mkerneld, mkctl = sys.argv[1:3]
if "MK_IN_NAMESPACE" not in os.environ:
    unshare = ["unshare", "--user", "--map-root-user", "--net"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        print("no network namespace is to be had here")
        sys.exit(77)
    os.environ["MK_IN_NAMESPACE"] = "1"
    os.execvp("unshare", [*unshare, sys.executable, *sys.argv])


def of_loopback(name, request, argument):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, request, struct.pack("16s16s8x", name, argument))


def set_address(there):
    """Gives the loopback interface ADDRESS, or takes it away."""
    SIOCSIFADDR, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x8914, 1
    of_loopback(b"lo", SIOCSIFFLAGS, struct.pack("H14x", IFF_UP))
    if there:
        of_loopback(b"lo:1", SIOCSIFADDR, struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(ADDRESS)))
    else:
        try:
            of_loopback(b"lo:1", SIOCSIFFLAGS, struct.pack("H14x", 0))
        except OSError:
            pass  # it did not have it


def eventually(what, done):
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if value := done():
            return value
        time.sleep(0.1)
    sys.exit(f"never: {what}")


def start(folder, listen, fabric, **environment):
    config = pathlib.Path(folder) / "mk.toml"
    config.write_text(f'listen = "{listen.format(folder=folder)}"\nsocket.path = "{folder}/s.sock"\nmetrics.listen = "{METRICS}"\n{fabric}\n')
    return subprocess.Popen([mkerneld, "--config", config, "--ready-file", f"{folder}/ready", "--log-format", "text"],
                            stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})


def metrics():
    with urllib.request.urlopen(f"http://{METRICS}/metrics", timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def check(listen, fabric, waits_for):
    with tempfile.TemporaryDirectory() as folder:
        ready = pathlib.Path(folder) / "ready"
        set_address(False)
        with start(folder, listen, fabric) as daemon:
            def ask(*command):
                return subprocess.run([mkctl, "--address", f"unix:{folder}/s-admin.sock", "--timeout", "30s", *command],
                                      capture_output=True, text=True, check=False)

            try:
                status = eventually("its status says what it waits for", lambda: (text := ask("status").stdout) and waits_for in text and text)
                assert status.startswith("node 0: not ready\n"), status
                said_no = ask("ready")
                assert said_no.returncode == 1 and waits_for in said_no.stderr, said_no
                assert ask("version").returncode == 0, "liveness"
                assert not ready.exists() and daemon.poll() is None
                scraped = metrics()
                assert 'mkernel_waiting{node="0"} 1' in scraped and "mkernel_control_responsive" not in scraped, scraped
                set_address(True)
                eventually("it is ready", ready.exists)
                assert ask("ready").returncode == 0
                assert ask("status").stdout.startswith("node 0: ok\n")
                scraped = metrics()
                assert 'mkernel_waiting{node="0"} 0' in scraped and 'mkernel_control_responsive{node="0"} 1' in scraped, scraped
            finally:
                daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(PATIENCE_S) == 0
            log = daemon.stderr.read()
            assert log.count("waiting: ") == 1, log
            print(f"waited, and then was ready: {waits_for}")

    # A stop while it waits is one as at any other time.
    with tempfile.TemporaryDirectory() as folder:
        set_address(False)
        with start(folder, listen, fabric) as daemon:
            for line in daemon.stderr:
                if "waiting: " in line:
                    break
            daemon.send_signal(signal.SIGTERM)
            assert "stopped while waiting" in daemon.stderr.read()
            assert daemon.wait(PATIENCE_S) == 0


def check_correction():
    """A name that never comes is corrected in the file, and a reload takes it; a file that is no good is refused."""
    with tempfile.TemporaryDirectory() as folder:
        ready = pathlib.Path(folder) / "ready"
        good = "insecure = true\nfabric.name = 'null'"
        with start(folder, f"{ADDRESS}:0", good) as daemon:
            def hears(what):
                for line in daemon.stderr:
                    if what in line:
                        return
                sys.exit(f"never said: {what}")

            try:
                hears("waiting: ")
                config = pathlib.Path(folder) / "mk.toml"
                as_it_was = config.read_text()
                config.write_text(as_it_was + "\nno_such_key = 1\n")
                daemon.send_signal(signal.SIGHUP)
                hears("the configuration is kept, since the new one is not valid")
                assert not ready.exists()

                def status():
                    return subprocess.run([mkctl, "--address", f"unix:{folder}/s-admin.sock", "--timeout", "30s", "status"],
                                          capture_output=True, text=True, check=False).stdout

                text = eventually("its status says that the reload was refused", lambda: "the last reload was refused" in (text := status()) and text)
                assert f"clients  {folder}/s.sock, 0 of 64 sessions" in text and f"service  {ADDRESS}:0" in text and "fabric   null" in text, text
                config.write_text(as_it_was.replace(ADDRESS, "127.0.0.1"))
                daemon.send_signal(signal.SIGHUP)
                eventually("it is ready with the corrected file", ready.exists)
                assert "127.0.0.1:" in ready.read_text(), ready.read_text()
            finally:
                daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(PATIENCE_S) == 0


def check_systemd():
    """For systemd a daemon that waits has started: a unit of Type=notify that has not is neither reloaded nor left alone by apt. It
    feeds the watchdog, and each reload has its end."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"{folder}/notify")
        systemd.settimeout(PATIENCE_S)
        config = pathlib.Path(folder) / "mk.toml"

        def hears(*parts):
            """The next message with all of them."""
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until:
                text = systemd.recv(65536).decode()
                if all(part in text.split("\n") or part.endswith("=") and part in text for part in parts):
                    return text
            sys.exit(f"systemd never hears {parts}")

        with start(folder, f"{ADDRESS}:0", "insecure = true\nfabric.name = 'null'", NOTIFY_SOCKET=f"{folder}/notify",
                   WATCHDOG_USEC="600000") as daemon:
            try:
                first = hears("READY=1")
                assert f"STATUS=waiting: cannot listen on {ADDRESS}:0" in first, first
                for _ in range(3):
                    hears("WATCHDOG=1")
                assert not (pathlib.Path(folder) / "ready").exists()
                as_it_was = config.read_text()
                for text, status in ((as_it_was + "\nno_such_key = 1\n", "STATUS=waiting: "),
                                     (as_it_was.replace(ADDRESS, "192.0.2.78"), "STATUS=waiting: cannot listen on 192.0.2.78:0"),
                                     (as_it_was.replace(ADDRESS, "127.0.0.1"), "STATUS=node 0: ")):
                    config.write_text(text)
                    daemon.send_signal(signal.SIGHUP)
                    hears("RELOADING=1", "MONOTONIC_USEC=")
                    assert status in (told := hears("READY=1")), told
                eventually("it is ready", (pathlib.Path(folder) / "ready").exists)
            finally:
                daemon.send_signal(signal.SIGTERM)
                daemon.stderr.read()
            assert daemon.wait(PATIENCE_S) == 0


def check_no_port():
    """No RDMA port is up, and the configuration names none: one may come."""
    with tempfile.TemporaryDirectory() as folder:
        with start(folder, f"unix:{folder}/peer", "fabric.name = 'verbs'") as daemon:
            for line in daemon.stderr:
                if "no active RDMA port for rail 0" in line:
                    break
            assert daemon.poll() is None
            daemon.send_signal(signal.SIGTERM)
            assert "stopped while waiting: " in daemon.stderr.read()
            assert daemon.wait(PATIENCE_S) == 0


def doctor_runs(check_id):
    report = json.loads(subprocess.run([mkerneld, "--doctor", "--json"], capture_output=True, text=True, check=False).stdout)
    return any(one["id"] == check_id and one["result"] != "SKIP" for one in report["checks"])


set_address(False)
check_correction()
check_systemd()
if not pathlib.Path("/sys/class/infiniband").exists() or not os.listdir("/sys/class/infiniband"):
    check_no_port()
check(f"{ADDRESS}:0", "insecure = true\nfabric.name = 'null'", f"cannot listen on {ADDRESS}:0: no interface of this machine has that address now")
if doctor_runs("ofi.version"):
    check("unix:{folder}/peer", "[fabric]\nname = 'ofi'\n[fabric.ofi]\nbind = ['" + ADDRESS + "']",
          f"cannot open rail 0: no interface has the address '{ADDRESS}' now")
