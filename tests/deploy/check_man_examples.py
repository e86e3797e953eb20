#!/usr/bin/env python3
"""check_man_examples.py <page.scd> <folder of programs>...: every command that the page shows runs, and prints what the page
says it does.

A block between ``` holds commands after "$ " and under each what a person sees: "..." stands for any text, runs of blanks
for any of them. They run in order, against two daemons of this machine with a job on them. What is no part of the test
(systemctl) is replaced by a program that succeeds.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

page, programs = pathlib.Path(sys.argv[1]), sys.argv[2:]


def examples():
    """(command, expected lines), in the page's order."""
    found, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = not inside
        elif inside and line.startswith("$ "):
            found.append((line[2:], []))
        elif inside:
            if not found:
                sys.exit(f"{page}: a block begins without a command: {line}")
            found[-1][1].append(line)
    return found


def matches(expected, seen):
    # scdoc's own escapes are not what a person sees.
    words = re.split(r"(\.\.\.|\s+)", expected.replace("\\\\", "\\").strip())
    pattern = "".join(r".*" if word == "..." else r"\s+" if word.isspace() else re.escape(word) for word in words)
    return re.fullmatch(pattern, seen.strip()) is not None


def start_cluster(work, environment):
    processes = []
    for node in (0, 1):
        (work / f"{node}").mkdir()
        (work / f"{node}/mkerneld.toml").write_text(f"""
node_id = {node}
listen = "unix:{work}/{node}/peer"
[socket]
path = "{work}/{node}/sock"
[[peer]]
id = {1 - node}
address = "unix:{work}/{1 - node}/peer"
""")
        command = ["mkerneld", "--config", f"{work}/{node}/mkerneld.toml", "--ready-file", f"{work}/{node}/ready"]
        processes.append(subprocess.Popen(command, env=environment, stderr=open(work / f"{node}/log", "w")))
    for node in (0, 1):
        wait_for(lambda: (work / f"{node}/ready").exists(), f"daemon {node}")
    (work / "nodes").write_text("".join(f"unix:{work}/{node}/peer\n" for node in (0, 1)))
    return processes


def wait_for(done, what, patience=60):
    until = time.monotonic() + patience
    while not done():
        if time.monotonic() > until:
            sys.exit(f"{what} does not come up")
        time.sleep(0.1)


def main():
    found = examples()
    if not found:
        sys.exit(f"{page} shows no command")
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        (work / "bin").mkdir()
        (work / "bin/systemctl").write_text("#!/bin/sh\nexit 0\n")
        (work / "bin/systemctl").chmod(0o755)
        environment = dict(os.environ, PATH=":".join([str(work / "bin"), *programs, os.environ["PATH"]]),
                           MKCTL_ADDRESS=f"unix:{work}/0/peer", TMPDIR=folder)
        environment.pop("MKERNELD_CONFIG", None)
        processes = start_cluster(work, environment)
        try:
            job = subprocess.Popen(
                ["mkbench", "gemm-ar", "--join", f"{work}/0/sock", f"{work}/1/sock", "--local", "1", "--m", "256", "--n",
                 "256", "--k", "256", "--iters", "100000", "--verify", "none"],
                env=environment, stdout=open(work / "job.log", "w"), stderr=subprocess.STDOUT)
            processes.append(job)

            def jobs():
                seen = subprocess.run(["mkctl", "--json", "job", "list"], env=environment, text=True, capture_output=True)
                return [one for one in json.loads(seen.stdout)["jobs"] if one["state"] == "up" and one["commands"] > 0]

            wait_for(lambda: job.poll() is None and jobs(), "the job")
            name = jobs()[0]["job"]
            for command, expected in found:
                # The page calls its job "train".
                seen = subprocess.run(["bash", "-c", command.replace("terminate train", f"terminate '{name}'")],
                                      env=environment, cwd=work, text=True, capture_output=True, timeout=120)
                lines = seen.stdout.replace(f"'{name}'", "'train'").splitlines()
                good = seen.returncode == 0 and len(lines) == len(expected)
                good = good and all(matches(a, b) for a, b in zip(expected, lines))
                print(("passed  " if good else "FAILED  ") + command)
                if not good:
                    failures += 1
                    print(f"  exit status {seen.returncode}; expected:")
                    print("".join(f"    {line}\n" for line in expected) + "  seen:")
                    print("".join(f"    {line}\n" for line in lines) + seen.stderr)
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait()
    print(f"{len(found) - failures} of {len(found)} commands of {page.name} print what it says")
    sys.exit(1 if failures else 0)


main()
