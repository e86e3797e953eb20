#!/usr/bin/env python3
"""check_dns.py <mkerneld> <mkctl> <mkbench>: daemons find each other through a DNS server (dnsmasq), by address and by SRV
records; join, leave, and stay together when the server is gone. Over TLS, too, where a node's certificate speaks for it alone."""
import signal
import sys

from cluster import Cluster, certificate, eventually, free_port, need

need("dnsmasq", "dnsmasq-base")
need("openssl", "openssl")
HOSTS = {node: f"127.0.0.{11 + node}" for node in range(4)}


def discovery(name, dns_port):
    return (f'[discovery]\nkind = "dns"\ninterval = "200ms"\n'
            f'[discovery.dns]\nname = "{name}"\nserver = "127.0.0.1:{dns_port}"\n')


def start_dns(cluster, port, *options):
    cluster.start("dnsmasq", "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts",
                  f"--port={port}", "--listen-address=127.0.0.1", "--bind-interfaces", "--local=/test/", "--user=root",
                  f"--pid-file={cluster.folder}/dnsmasq.pid", f"--addn-hosts={cluster.folder}/hosts", *options)


def publish(cluster, *nodes):
    """The headless service has these pods now."""
    (cluster.folder / "hosts").write_text("".join(f"{HOSTS[node]} mkernel.test\n" for node in nodes))
    if "dnsmasq" in cluster.programs:
        cluster.programs["dnsmasq"].send_signal(signal.SIGHUP)


def addresses(cluster):
    port, dns_port = free_port(HOSTS[0]), free_port()
    by_name = discovery(f"mkernel.test:{port}", dns_port)
    publish(cluster, 0, 1)
    start_dns(cluster, dns_port)
    for node in (0, 1):
        cluster.start_node(node, f"{HOSTS[node]}:{port}", by_name)
    cluster.expect_cluster(0, 1)
    cluster.run_job(0, 1)

    seen = cluster.doctor(0)
    assert seen == f"PASS node 1 ({HOSTS[1]}:{port}): reachable", seen
    publish(cluster, 0, 1, 2)
    eventually("the doctor misses the daemon of an address",
               lambda: f"a node yet unknown ({HOSTS[2]}:{port}): Connection refused" in cluster.doctor(0))
    publish(cluster, 0, 1)

    cluster.start_node(2, f"{HOSTS[2]}:{port}", by_name)  # not in DNS yet: it finds others, who do not let it in
    publish(cluster, 0, 1, 2)
    cluster.expect_cluster(0, 1, 2)
    cluster.run_job(0, 1, 2)

    cluster.stop("node2", signal.SIGKILL)
    publish(cluster, 0, 1)
    cluster.expect_cluster(0, 1)

    # A second daemon that says it is node 1.
    cluster.start_node(1, f"{HOSTS[3]}:{port}", by_name, name="impostor")
    cluster.addresses[1] = f"{HOSTS[1]}:{port}"
    publish(cluster, 0, 1, 3)
    cluster.problem(0, "both have node id 1")
    cluster.problem(1, "has node id 1, as this one does")
    cluster.run_job(0, 1)
    cluster.stop("impostor")
    publish(cluster, 0, 1)
    cluster.healthy(0)

    # Without a name server, who is known stays known.
    cluster.stop("dnsmasq")
    cluster.problem(0, "no name server answered for mkernel.test")
    seen = cluster.doctor(0)
    assert seen.startswith("FAIL discovery (dns): no name server answered"), seen
    cluster.run_job(0, 1)
    start_dns(cluster, dns_port)
    cluster.healthy(0)
    for name in ("node0", "node1", "dnsmasq"):
        cluster.stop(name)


def services(cluster):
    dns_port = free_port()
    ports = {node: free_port(HOSTS[node]) for node in (0, 1)}
    (cluster.folder / "hosts").write_text("".join(f"{HOSTS[node]} n{node}.mkernel.test\n" for node in ports))
    start_dns(cluster, dns_port,
              *[f"--srv-host=_peer._tcp.mkernel.test,n{node}.mkernel.test,{port}" for node, port in ports.items()])
    for node, port in ports.items():
        cluster.start_node(node, f"{HOSTS[node]}:{port}", discovery("_peer._tcp.mkernel.test", dns_port))
    cluster.expect_cluster(0, 1)
    cluster.run_job(0, 1)


def secured(cluster, name, dns_port, certificate_of):
    """The configuration of a daemon that shows `certificate_of`'s certificate."""
    files = cluster.folder
    return (discovery(name, dns_port) +
            f'[tls]\ncert = "{files}/{certificate_of}.crt"\nkey = "{files}/{certificate_of}.key"\nca = "{files}/ca.crt"\n')


def certificates(cluster):
    """Each node has a certificate for the service's name, by which all are found, and for its own. As the chart's nodes do."""
    certificate(cluster.folder, "ca")
    for node in range(3):
        certificate(cluster.folder, f"node-{node}", "ca", f"DNS:mkernel.test,DNS:node-{node}.mkernel.test")
    certificate(cluster.folder, "service", "ca", "DNS:mkernel.test")
    port, dns_port = free_port(HOSTS[0]), free_port()

    def start(node, shown, host=None, name=None):
        cluster.start_node(node, f"{HOSTS[node if host is None else host]}:{port}",
                           secured(cluster, f"mkernel.test:{port}", dns_port, shown), name)
        # Over TCP one would need a certificate to ask.
        cluster.addresses[name or node] = f"unix:{cluster.folder}/{name or f'node{node}'}.admin"

    publish(cluster, 0, 1, 2)
    start_dns(cluster, dns_port)
    for node in (0, 1):
        start(node, f"node-{node}")
    cluster.expect_cluster(0, 1)
    cluster.run_job(0, 1)

    # Node 2 with another node's certificate, and with one that is made out to the name of all alone.
    for shown in ("node-1", "service"):
        start(2, shown)
        for node in (0, 1):
            cluster.problem(node, "says that it is node 2, but its certificate, of 'mkernel.test'")
            cluster.problem(node, "made out to node-2.mkernel.test")
            eventually("node 2 hears that nobody knows it",
                       lambda: f"node {node} does not know node 2" in cluster.reason(2, node))
            assert 2 not in cluster.peers(node), f"node {node} knows node 2 by {shown}'s certificate"
        cluster.stop("node2")
    start(2, "node-2")
    cluster.expect_cluster(0, 1, 2)
    cluster.healthy(0)
    cluster.run_job(0, 1, 2)

    # Node 2's owner would like to be node 1, which is away.
    cluster.stop("node2")
    cluster.stop("node1", signal.SIGKILL)
    start(1, "node-2", host=2, name="impostor")
    eventually("the impostor is refused", lambda: "does not speak for node 1" in cluster.reason("impostor", 0))
    assert 1 not in cluster.peers_up(0)
    start(1, "node-1")
    eventually("node 1 itself is let in beside it", lambda: 1 in cluster.peers_up(0))
    cluster.run_job(0, 1)


for part in (addresses, services, certificates):
    with Cluster(*sys.argv[1:4]) as one:
        part(one)
    print(f"{part.__name__}: well")
