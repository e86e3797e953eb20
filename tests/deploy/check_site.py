#!/usr/bin/env python3
"""check_site.py <repository> <folder with mkerneld, mkctl, mkbench and mkrun> <gemm_all_reduce>: what deploy/docs tells users to type.

- Blocks marked `console` run, page by page, and print what the page says (console.py). Pages of ALONE start their own daemons;
  the others have two daemons of this machine and a job on them.
- Blocks marked `sh` need root, GPUs, a cluster or an hour. Of these, and of commands within the text, our programs' commands and
  flags must exist.
- A block of any other kind must be one that nobody types.
- Installing anew by "Other distributions" keeps the site's configuration: its block is typed twice, with programs that change nothing.
"""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

import commands
import console
import tensors
from cluster import Cluster, moving_job

repository, programs, example = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]).resolve()
docs = repository / "deploy/docs"
os.environ["PATH"] = programs + ":" + os.environ["PATH"]
os.environ.pop("MKERNELD_CONFIG", None)
ALONE = ["tutorials/01_laptop.md", "tutorials/03_two_nodes.md"]
SILENT = {"toml", "ini", "cpp", "c", "python", "yaml", "json", "text", "{toctree}", "{eval-rst}", "{literalinclude}"}
OURS = "mkctl|mkbench|mkrun|mkerneld"


def blocks(text):
    """(language, lines) of each fenced block, those within lists too."""
    for indent, language, block in re.findall(r"^( *)```(\S*)[^\n]*\n(.*?)^ *```", text, re.M | re.S):
        yield language, [line[len(indent):] for line in block.splitlines()]


def check_words(page, text):
    """Commands that are not run must exist."""
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    spans = re.findall(rf"`((?:{OURS}) [^`]+)`", outside)
    for language, lines in blocks(text):
        assert language in SILENT | {"console", "sh"}, f"{page}: a block of '{language}': mark what a test can run as console, the rest as sh"
        if language == "sh":
            spans += [part.strip() for line in lines for part in re.split(r"&&|;", line) if re.match(rf"\s*({OURS}) ", part)]
    for span in spans:
        assert not (wrong := commands.trouble(span)), f"{page} says `{span}`, but {wrong}"


def found_in(text):
    return [one for language, lines in blocks(text) if language == "console" for one in console.examples(lines)]


class Typist:
    """Types a page's commands in a folder; names of the page are replaced by those of the test."""

    def __init__(self, folder, names, environment):
        self.folder, self.names, self.environment, self.failures, self.count = folder, names, environment, 0, 0
        self.background = []

    def seen(self, typed):
        done = subprocess.run(["bash", "-c", typed], env=self.environment, cwd=self.folder, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=120)
        return done.returncode, done.stdout

    def page(self, page, text):
        for command, expected in found_in(text):
            self.count += 1
            typed = command
            for from_page, in_test in self.names.items():
                typed = typed.replace(from_page, in_test)
            if typed.endswith("&"):
                log = open(self.folder / "background.log", "a")
                self.background.append(subprocess.Popen(["bash", "-c", "exec env " + typed[:-1]], env=self.environment, cwd=self.folder,
                                                        stdout=log, stderr=log))
                continue
            until = time.monotonic() + 60
            while True:
                status, output = self.seen(typed)
                for from_page, in_test in self.names.items():
                    output = output.replace(in_test, from_page)
                good = status == 0 and console.matches(expected, output.splitlines())
                # What has just been started may take a moment to be there.
                if good or not self.background or not typed.startswith("mkctl") or time.monotonic() > until:
                    break
                time.sleep(0.1)
            print(f"{'passed' if good else 'FAILED'}  {page}: {command}")
            if not good:
                self.failures += 1
                print(console.mismatch(status, expected, output.splitlines()), end="")

    def end(self):
        for process in self.background:
            process.terminate()
        for process in self.background:
            process.wait()


def check_second_install(text):
    (block,) = [lines for language, lines in blocks(text) if language == "sh" and any("systemd-sysusers" in line for line in lines)]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "bin").mkdir()
        installed, used = folder / "usr/local/etc/mkernel/mkerneld.toml", folder / "etc/mkernel/mkerneld.toml"
        for program in ("cmake", "systemctl", "systemd-sysusers", "systemd-tmpfiles"):
            (folder / "bin" / program).write_text(f'#!/bin/sh\n[ "$1" != --install ] || {{ mkdir -p {installed.parent}; echo "# $NUMBER" >{installed}; }}\n')
            (folder / "bin" / program).chmod(0o755)
        typed = re.sub(r"/usr/local|(?<!/usr/local)/etc/mkernel", lambda found: name + found[0], "\n".join(block))
        for number in "12":
            environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "NUMBER": number}
            subprocess.run(["bash", "-ec", typed], env=environment, cwd=folder, check=True)
            if number == "1":
                assert used.read_text() == "# 1\n", "the first install puts no configuration where the unit reads it"
                used.write_text("node_id = 7\n")
        assert installed.read_text() == "# 2\n" and used.read_text() == "node_id = 7\n", "a second install replaces the site's configuration"


def main():
    pages = {str(path.relative_to(docs)): path.read_text(encoding="utf-8") for path in sorted(docs.rglob("*.md"))}
    for page, text in pages.items():
        check_words(page, text)
    check_second_install(pages["operations.md"])
    run = {page: text for page, text in pages.items() if found_in(text)}
    assert set(ALONE) <= set(run) and len(run) >= 4, f"only {sorted(run)} show commands that run"
    count = failures = 0

    folder = pathlib.Path(tempfile.mkdtemp(prefix="mk-site-"))
    alone = Typist(folder, {"/tmp/": f"{folder}/"}, dict(os.environ))
    try:
        tensors.write(folder / "acts.safetensors", "x", 64, 96)
        tensors.write(folder / "model.safetensors", "layers.0.weight", 32, 96)
        (folder / "gemm_all_reduce").symlink_to(example)
        for page in ALONE:
            alone.page(page, run[page])
    finally:
        alone.end()
        shutil.rmtree(folder)
    count, failures = count + alone.count, failures + alone.failures

    with Cluster() as cluster:
        environment = {**os.environ, "MKCTL_ADDRESS": cluster.address(0), "MKERNEL_SOCKET": cluster.socket(0)}
        job = moving_job(cluster, environment)
        names = {"/etc/mkernel/mkerneld.toml": f"{cluster.folder}/0/mkerneld.toml", "terminate train": f"terminate {shlex.quote(job)}",
                 "set train": f"set {shlex.quote(job)}", "'train'": f"'{job}'"}
        typist = Typist(cluster.folder, names, environment)
        # The page on Kubernetes uses the CA of the one on operations. The tutorial drains the daemon in the end.
        for page in sorted(set(run) - set(ALONE), key=lambda page: (page == "tutorials/05_operate.md", page == "kubernetes.md", page)):
            typist.page(page, run[page])
    count, failures = count + typist.count, failures + typist.failures
    print(f"{count - failures} of {count} commands of {len(run)} pages print what they say")
    sys.exit(1 if failures else 0)


main()
