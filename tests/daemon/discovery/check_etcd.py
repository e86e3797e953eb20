#!/usr/bin/env python3
"""check_etcd.py <mkerneld> <mkctl> <mkbench>: daemons find each other through a real etcd. A dead one leaves the list with its
lease, one that stops leaves at once; when etcd is gone, who is known stays known. Once more over TLS."""
import os
import pathlib
import signal
import sys
import time

from cluster import Cluster, certificate, eventually, free_port, need

need("etcd", "etcd-server")
need("openssl", "openssl")
os.environ.setdefault("ETCD_UNSUPPORTED_ARCH", os.uname().machine)


def data_folder(cluster):
    """In memory where there is some: etcd waits for every write to reach its disk, and a busy one is none of this test's."""
    folder = pathlib.Path(f"/dev/shm/{cluster.folder.name}" if os.access("/dev/shm", os.W_OK) else cluster.folder / "etcd")
    folder.mkdir(mode=0o700, exist_ok=True)
    cluster.folders.append(folder)
    return folder


def start_etcd(cluster, client, peer, *options, scheme="http"):
    cluster.start("etcd", "etcd", "--name", "one", "--data-dir", data_folder(cluster),
                  "--listen-client-urls", f"{scheme}://127.0.0.1:{client}",
                  "--advertise-client-urls", f"{scheme}://127.0.0.1:{client}",
                  "--listen-peer-urls", f"http://127.0.0.1:{peer}",
                  "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
                  "--initial-cluster", f"one=http://127.0.0.1:{peer}", *options)


def discovery(client, ttl="4s", extra=""):
    return (f'[discovery]\nkind = "etcd"\ninterval = "200ms"\n'
            f'[discovery.etcd]\nendpoints = ["127.0.0.1:1", "127.0.0.1:{client}"]\nttl = "{ttl}"\n{extra}')


def address():
    return f"127.0.0.1:{free_port()}"


def plain(cluster):
    client, peer = free_port(), free_port()
    quick, slow = discovery(client), discovery(client, ttl="60s")
    start_etcd(cluster, client, peer)
    for node in (0, 1):
        cluster.start_node(node, address(), quick)
    cluster.expect_cluster(0, 1)
    cluster.run_job(0, 1)
    seen = cluster.doctor(0)
    assert seen == f"PASS node 1 ({cluster.addresses[1]}): reachable", seen
    cluster.expect_cluster(0, 1)  # the doctor has left nothing in etcd, and taken nothing

    cluster.start_node(2, address(), quick)
    cluster.expect_cluster(0, 1, 2)
    cluster.run_job(0, 1, 2)

    # Dead: it stays in the list until its lease has ended, and not for long after.
    cluster.stop("node2", signal.SIGKILL)
    eventually("node 0 has lost node 2", lambda: cluster.peers_up(0) == {1})
    assert 2 in cluster.peers(0), "node 2 left the list before its lease had ended"
    cluster.expect_cluster(0, 1)

    # Stopped: it gives its lease back instead of letting it run out.
    cluster.start_node(2, address(), slow)
    cluster.expect_cluster(0, 1, 2)
    began = time.monotonic()
    cluster.stop("node2")
    cluster.expect_cluster(0, 1)
    assert time.monotonic() - began < 50, "node 2 left with its lease, not when it stopped"

    # Killed and back at its address before the lease has ended: it takes its key over.
    home = address()
    cluster.start_node(2, home, slow)
    cluster.expect_cluster(0, 1, 2)
    cluster.stop("node2", signal.SIGKILL)
    cluster.start_node(2, home, slow)
    cluster.expect_cluster(0, 1, 2)

    # A node id that is taken.
    first = cluster.addresses[1]
    cluster.start_node(1, address(), quick, name="impostor")
    cluster.addresses["impostor"], cluster.addresses[1] = cluster.addresses[1], first
    cluster.problem("impostor", "etcd has node id 1 for the daemon at")
    cluster.expect_cluster(0, 1, 2)
    cluster.stop("impostor")

    # etcd goes and comes back: nobody is lost meanwhile, and leases that have ended are made anew.
    cluster.stop("etcd", signal.SIGKILL)
    cluster.problem(0, "etcd does not answer")
    cluster.run_job(0, 1, 2)
    time.sleep(4.5)  # more than the leases have
    start_etcd(cluster, client, peer)
    for node in (0, 1):
        cluster.healthy(node)
    cluster.expect_cluster(0, 1, 2)


def over_tls(cluster):
    client, peer = free_port(), free_port()
    files = cluster.folder
    certificate(files, "ca")
    for name in ("server", "daemon"):
        certificate(files, name, "ca")
    start_etcd(cluster, client, peer, "--cert-file", files / "server.crt", "--key-file", files / "server.key",
               "--client-cert-auth", "--trusted-ca-file", files / "ca.crt", scheme="https")
    secured = discovery(client, extra=f'cert = "{files}/daemon.crt"\nkey = "{files}/daemon.key"\nca = "{files}/ca.crt"\n')
    for node in (0, 1):
        cluster.start_node(node, address(), secured)
    cluster.expect_cluster(0, 1)
    cluster.start_node(2, address(), discovery(client))  # without a certificate
    cluster.problem(2, "etcd does not answer")
    assert cluster.peers(0) == {1}


for part in (plain, over_tls):
    with Cluster(*sys.argv[1:4]) as one:
        part(one)
    print(f"{part.__name__}: well")
