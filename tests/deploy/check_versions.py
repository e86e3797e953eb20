"""check_versions.py <build folder> <folder of the previous release>: releases side by side work, or say which to upgrade.

Every mixture of daemons, clients, Python packages and mkctl of this build and of the previous release (build_previous.sh), with
real processes. A mixture passes when all its ranks end well with right results, or when one says what to install.
"""
import json
import os
import re
import subprocess
import sys

from cluster import Cluster, PATIENCE_S

REFUSAL = re.compile(r"(install|upgrade|update) ", re.IGNORECASE)
RANK = """
import numpy, mkernel
group = mkernel.init()
group.barrier()
print(group)
mkernel.shutdown()
"""


def python_with_numpy():
    for program in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([program, "-c", "import numpy"], capture_output=True, check=False).returncode == 0:
            return program
    sys.exit("no Python here has NumPy, which the package needs: apt install python3-numpy")


PYTHON = python_with_numpy()


class Release:
    def __init__(self, name, build, source):
        self.name, self.source = name, source

        def find(program):
            found = subprocess.run(["find", "-L", build, "-name", program, "-type", "f"], text=True, capture_output=True, check=True).stdout.split()
            assert found, f"{build} has no {program}"
            return found[0]

        self.mkerneld, self.mkctl, self.example = find("mkerneld"), find("mkctl"), find("gemm_all_reduce_example")
        self.library = find("libmkclient.so")

    def python(self):
        return [PYTHON, "-c", RANK], {"PYTHONPATH": f"{self.source}/client/python", "MKERNEL_LIBRARY": self.library}


def outcome(what, processes):
    """Of one mixture: "works", or what it says; an assertion if that is no advice."""
    said = []
    for process in processes:
        output, _ = process.communicate(timeout=PATIENCE_S)
        if process.returncode != 0:
            said.append(output.strip())
    if not said:
        return "works"
    advice = [text for text in said if REFUSAL.search(text)]
    assert advice, f"{what}: fails, and nobody says what to install: {said}"
    return f"refused: {advice[0].splitlines()[-1]}"


def run(cluster, job, clients, python=False):
    processes = []
    for rank in range(4):
        release = clients[rank // 2]
        command, more = release.python() if python else ([release.example], {})
        cluster.environment = {**os.environ, **more}
        processes.append(cluster.rank(command, job, rank))
    return processes


def main():
    here, previous_folder = sys.argv[1:3]
    new = Release("new", here, os.path.abspath(f"{os.path.dirname(__file__)}/../.."))
    old = Release("previous", f"{previous_folder}/build", f"{previous_folder}/source")
    results = {}
    for daemons in ([new, new], [old, old], [old, new]):
        with Cluster([one.mkerneld for one in daemons]) as cluster:
            between = " and ".join(one.name for one in daemons)
            for clients in ([old, old], [new, new], [old, new]):
                what = f"daemons {between}, clients " + " and ".join(one.name for one in clients)
                results[what] = outcome(what, run(cluster, f"c{len(results)}", clients))
            for package in (old, new):
                what = f"daemons {between}, Python package {package.name}"
                results[what] = outcome(what, run(cluster, f"p{len(results)}", [package, package], python=True))
            for tool in (old, new):
                what = f"daemons {between}, mkctl {tool.name}"
                status = subprocess.run([tool.mkctl, "--json", "--hosts", f"@{cluster.folder}/nodes", "status"], text=True, capture_output=True)
                assert status.returncode == 0, f"{what}: {status.stderr}{status.stdout}"
                hosts = json.loads(status.stdout)["hosts"]
                assert [host["answer"]["peers"][0]["state"] for host in hosts] == ["up", "up"], f"{what}: {status.stdout}"
                results[what] = "works"
    for what, result in results.items():
        print(f"{what}: {result}")
    # Where the daemons are of one release, clients of one release need no other one.
    refused = [what for what, result in results.items() if result != "works" and "previous and new" not in what]
    assert not refused, refused


main()
