#!/usr/bin/env python3
"""check_man_examples.py <folder of pages> <build folder> <folder of programs>...: every command that the man pages show runs,
and prints what the page says it does.

A block between ``` holds commands after "$ " (a line that ends with a backslash goes on) and under each what a person sees:
"..." stands for any text, a line of it alone for any lines, runs of blanks for any of them. They run in order, against two
daemons of this machine with a job on them. What is no part of the test (systemctl) is replaced by a program that succeeds.

Commands within the text must exist, with their flags; a page names no flag that its program has not, and mkctl(1) and mkrun(1)
leave no command out, mkerneld(8) and mkctl(1) no flag.
"""
import os
import pathlib
import re
import subprocess
import sys

import commands
import console
import tensors
from cluster import Cluster, moving_job

pages, build, programs = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
# The last one ends the job and drains a daemon.
PAGES = ["mkerneld.8", "mkerneld.toml.5", "mkbench.1", "mkrun.1", "libmkclient.3", "mkctl.1"]
OURS = "mkctl|mkbench|mkrun|mkerneld"


def plain(line):
    """scdoc's own escapes are not what a person sees."""
    return re.sub(r"\\(.)", r"\1", line)


def blocks(text):
    return re.findall(r"^```\n(.*?)^```", text, re.M | re.S)


def examples(name, text):
    """(command, expected lines), in the page's order."""
    found = []
    for block in blocks(text):
        lines = [plain(line) for line in block.splitlines()]
        if not any(line.startswith("$ ") for line in lines):
            assert not re.search(rf"^({OURS}|systemctl|cc|c\+\+) ", block, re.M), f"{name}: a command without '$ ':\n{block}"
            continue
        assert lines[0].startswith("$ "), f"{name}: a block begins without a command: {lines[0]}"
        found += console.examples(lines)
    return found


def within_text(name, text):
    """What is said of our programs outside of blocks."""
    outside = re.sub(r"^```\n.*?^```", "", text, flags=re.M | re.S)
    for span in re.findall(rf"\*((?:{OURS}) [^*]+)\*", outside):
        assert not (wrong := commands.trouble(span)), f"{name} says *{span}*, but {wrong}"
    program = name.rpartition(".")[0]
    if program not in OURS.split("|"):
        return
    known, shown = commands.all_flags(program), set(commands.flags_in(re.sub(r"systemctl [^*\n]*", "", text)))
    others = set() if program == "mkerneld" else commands.all_flags("mkerneld")
    assert shown <= known | others, f"{name} shows {shown - known}, which {program} has not"
    if program in ("mkctl", "mkrun"):
        for command in commands.all_commands(program):
            assert re.search(rf"\*{' '.join(command)}\*", text), f"{name} leaves out {program} {' '.join(command)}"
    if program in ("mkctl", "mkerneld"):
        assert (missing := known - shown - {"--help", "--version", "--output"}) == set(), f"{name} leaves out {missing}"


def prepare(work, environment):
    """What the pages take for granted: files of a user, an installed libmkclient, systemctl."""
    (work / "bin").mkdir()
    (work / "bin/systemctl").write_text("#!/bin/sh\nexit 0\n")
    (work / "bin/systemctl").chmod(0o755)
    for name, key, rows, columns in (("a", "a", 64, 96), ("b", "b", 96, 32), ("acts", "x", 64, 96),
                                     ("model", "layers.0.weight", 32, 96)):
        tensors.write(work / f"{name}.safetensors", key, rows, columns)
    for component in ("libmkclient1", "libmkclient-dev"):
        subprocess.run(["cmake", "--install", build, "--component", component, "--prefix", work / "usr"], check=True, capture_output=True)
    (pkgconfig,) = (work / "usr").glob("lib*/**/pkgconfig")
    environment["PKG_CONFIG_PATH"], environment["LD_LIBRARY_PATH"] = str(pkgconfig), str(pkgconfig.parent)


def run(name, cluster, environment, job):
    """How many commands there are, and how many failed. Names in a page are those of the page; here they are the test's."""
    here = {"/run/mkernel/mkerneld.sock": cluster.socket(0), "/run/mkernel/other.sock": cluster.socket(1),
            "/etc/mkernel/mkerneld.toml": f"{cluster.folder}/0/mkerneld.toml", "/usr/share/doc": f"{cluster.folder}/usr/share/doc",
            "terminate train": f"terminate '{job}'", "show train": f"show '{job}'"}
    failures = 0
    found = examples(name, (pages / f"{name}.scd").read_text())
    for command, expected in found:
        typed = command
        for from_page, in_test in here.items():
            typed = typed.replace(from_page, in_test)
        seen = subprocess.run(["bash", "-c", typed], env=environment, cwd=cluster.folder, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=120)
        lines = seen.stdout.replace(f"'{job}'", "'train'").splitlines()
        good = seen.returncode == 0 and console.matches(expected, lines)
        print(f"{'passed' if good else 'FAILED'}  {name}: {command}")
        if not good:
            failures += 1
            print(console.mismatch(seen.returncode, expected, lines), end="")
    return len(found), failures


def main():
    assert {page.name for page in pages.glob("*.scd")} == {f"{name}.scd" for name in PAGES}
    os.environ["PATH"] = ":".join([*programs, os.environ["PATH"]])
    environment = {key: value for key, value in os.environ.items() if key != "MKERNELD_CONFIG"}
    for name in PAGES:
        within_text(name, (pages / f"{name}.scd").read_text())
    with Cluster(environment=environment) as cluster:
        environment.update(PATH=f"{cluster.folder}/bin:{environment['PATH']}", MKCTL_ADDRESS=cluster.address(0), TMPDIR=str(cluster.folder),
                           MKERNEL_SOCKET=cluster.socket(0))
        prepare(cluster.folder, environment)
        counts = []
        for name in PAGES:
            job = moving_job(cluster, environment) if name == "mkctl.1" else "none"
            counts.append(run(name, cluster, environment, job))
    for name, (count, _) in zip(PAGES, counts):
        assert count > 0, f"{name} shows no command"
    failures = sum(failed for _, failed in counts)
    print(f"{sum(count for count, _ in counts) - failures} of {sum(count for count, _ in counts)} commands of {len(PAGES)} pages print "
          f"what they say")
    sys.exit(1 if failures else 0)


main()
