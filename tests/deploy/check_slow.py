#!/usr/bin/env python3
"""check_slow.py <mkerneld> <mkctl> <gemm_all_reduce> <uneven_ranks>: `mkctl who-is-slow` on real processes. A rank that is stopped is
named, by all nodes together and by its own daemon, and no other as stopped; when it goes on, nobody is. A rank that computes longer than the
others inside each launch is named with operator and phase, and who waits for it is not blamed. A link on which nothing moves is named, and one
that moves too little, only in the direction that is slow, and not the rank that has sent."""
import functools
import json
import re
import signal
import subprocess
import sys
import time

from cluster import Cluster, wait_for

NAMED_MAX_S = 20  # two looks, and a second of silence; the rest is for busy machines
mkerneld, mkctl, program, uneven = sys.argv[1:5]


def who_is_slow(cluster, *arguments, hosts=None, interval="300ms"):
    return subprocess.run([mkctl, "--hosts", hosts or f"@{cluster.folder}/nodes", "--timeout", "30s", *arguments, "who-is-slow", "--interval", interval],
                          text=True, capture_output=True, check=True).stdout


def said_by(cluster, node, *command):
    return subprocess.run([mkctl, "--hosts", cluster.address(node), *command], text=True, capture_output=True, check=True).stdout


def findings(cluster, kind, **where):
    return [one for one in json.loads(who_is_slow(cluster, "--json", **where))["findings"] if one["kind"] == kind]


def launches(cluster):
    """Launches begun or ended, by rank; of the nodes that answered."""
    seen = subprocess.run([mkctl, "--hosts", f"@{cluster.folder}/nodes", "--json", "session", "list"], text=True, capture_output=True, check=False)
    hosts = json.loads(seen.stdout)["hosts"] if seen.returncode == 0 else []
    return {one["rank"]: one["launches"] for host in hosts for one in host["answer"]["sessions"]}


def await_motion(cluster, ranks):
    """Until every rank is past where it was when this was called."""
    def all_there():
        now = launches(cluster)
        return now if len(now) == ranks else None

    before = wait_for(all_there, "the job")
    wait_for(lambda: (now := all_there()) and all(count > before[rank] + 4 for rank, count in now.items()), "the job goes on")


with Cluster(mkerneld) as nodes:
    ranks = [nodes.rank([program, "64", "64", "32", "600"], "train", rank) for rank in range(4)]
    await_motion(nodes, 4)
    for rank in (1, 2):
        process = ranks[rank]
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()

        def only_it(**where):
            """On a busy machine another one may have stood still for a second, too: not for long. Those that wait in an exchange hold up nobody."""
            found = json.loads(who_is_slow(nodes, "--json", **where))["findings"]
            return found if [(one["kind"], one["rank"]) for one in found] == [("rank-stopped", rank)] else None

        found = wait_for(only_it, f"rank {rank} is named", NAMED_MAX_S)
        print(f"rank {rank}, stopped, is named after {time.monotonic() - began:.1f} s: {found[0]['who']}: {found[0]['why']}")
        assert found[0]["node"] == rank // 2, found
        text = who_is_slow(nodes)
        line = rf"^train +rank {rank} \(node {rank // 2}, pid {process.pid}\) .*its process has not run for "
        assert re.search(line, text, re.M), text
        wait_for(lambda: only_it(hosts=nodes.address(rank // 2)), "its own daemon names it", NAMED_MAX_S)
        # That one says whom its ranks wait for, and blames nobody whom it does not see.
        wait_for(lambda: re.search(r"^train: ranks? [0-9, ]+ waits? for rank \d of another node for ", said_by(nodes, 1 - rank // 2, "job", "list"), re.M),
                 "`job list` of the other node", NAMED_MAX_S)
        # From the other node as well, whose own ranks only wait: mkctl asks the daemon of this one itself.
        wait_for(lambda: only_it(hosts=nodes.address(1 - rank // 2)), "the other daemon leads to it", NAMED_MAX_S)
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: not findings(nodes, "rank-stopped"), "nobody is named any more", NAMED_MAX_S)
        await_motion(nodes, 4)
    assert all(process.poll() is None for process in ranks)

with Cluster(mkerneld) as nodes:
    ranks = [nodes.rank([uneven, "512", "512", "256", "3", "128"], "train", rank) for rank in range(4)]
    await_motion(nodes, 4)

    def only_the_one_that_computes():
        """At both looks it may wait for an instant: not for long."""
        found = json.loads(who_is_slow(nodes, "--json", interval="1s"))["findings"]
        return found if [(one["kind"], one["rank"]) for one in found] == [("rank-holds", 3)] and ", compute, " in found[0]["why"] else None

    found = wait_for(only_the_one_that_computes, "rank 3 is named, and nobody else", NAMED_MAX_S)
    print(f"rank 3, which computes for long, is named: {found[0]['who']}: {found[0]['why']}")
    assert re.match(r"works: gemm_ar launch \d+ \(tag 7\), compute, \d+ of \d+ tiles", found[0]["why"]), found
    assert re.search("ranks 0, 1, 2 wait (at least|all the time)", found[0]["why"]), found
    said = functools.partial(said_by, nodes, 1)

    wait_for(lambda: re.search(r"^train: rank 3 \(gemm_ar launch .*, compute.*\) holds up rank 2 for", said("job", "list"), re.M),
             "`job list` says who holds up whom", NAMED_MAX_S)
    wait_for(lambda: re.search(r" 2/4 .* gemm_ar launch \d+ \(tag 7\), \w+ waits for .* of rank \d.*; for ", said("session", "list")),
             "`session list` says what a rank waits for", NAMED_MAX_S)
    # Traces and metrics speak of the launch as well; ranks 2 and 3 are of that node.
    recording = nodes.folder / "trace.json"
    said("trace", "record", "--seconds", "2", "-o", recording)
    told = [event["args"] for event in json.loads(recording.read_text())["traceEvents"] if event["ph"] == "b"]
    # Of commands that were taken late the launch is not known any more where the recording begins.
    known = [(one["operator"], one["m"], one["n"], one["k"], one["tag"]) for one in told if "operator" in one]
    assert {one[:3] + one[4:] for one in known} == {("gemm_ar", 512, 512, 7)} and all(one[3] > 0 for one in known) and 2 * len(known) > len(told), told[:3]
    assert re.search(r'^mkernel_operator_launches_total{job_name="train",uid="\d+",operator="gemm_ar",tag="7",node="1"} [1-9]', said("metrics"), re.M)
    for process in ranks:
        process.kill()
    wait_for(lambda: re.search(r"^ended:\n.*\ntrain +\d+ +2 +with an error ", said("job", "list"), re.M), "`job list` shows the job that ended")
    wait_for(lambda: "with an error" in said("job", "show", "train"), "`job show`, too")

slow = '[fabric.loopback]\nbandwidth = "50KB/s"\n'
with Cluster(mkerneld, more=lambda node: slow if node == 0 else "") as nodes:
    ranks = [nodes.rank([program, "512", "512", "32", "600"], "train", rank, local=1) for rank in range(2)]
    found = wait_for(lambda: findings(nodes, "link-stalled"), "the slow link is named")
    print(f"the slow link is named: {found[0]['who']}: {found[0]['why']}")
    assert {one["who"] for one in found} == {"the link of rail 0 from node 0 to node 1"}, found
    assert all(process.poll() is None for process in ranks)

# 2 MB/s move, and ranks of node 1 wait for what rank 0 has sent long ago. Rank 0 is not to blame.
slow = '[fabric.loopback]\nbandwidth = "2MB/s"\n'
with Cluster(mkerneld, more=lambda node: slow if node == 0 else "") as nodes:
    ranks = [nodes.rank([program, "512", "512", "32", "100000"], "train", rank, local=1) for rank in range(2)]
    found = wait_for(lambda: findings(nodes, "link-slow", interval="1s"), "the link that moves too little is named")
    print(f"the link that is slow is named: {found[0]['who']}: {found[0]['why']}")
    assert {one["who"] for one in found} == {"the link of rail 0 from node 0 to node 1"}, found
    wait_for(lambda: [one["kind"] for one in json.loads(who_is_slow(nodes, "--json", interval="1s"))["findings"]] == ["link-slow"], "and no rank")
