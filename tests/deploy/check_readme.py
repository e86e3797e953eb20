#!/usr/bin/env python3
"""check_readme.py <repository> <folder with mkerneld, mkctl, mkbench and mkrun> <libmkclient.so>: what README.md tells users to type.

Every line of a fenced block is run as it stands and what it prints is compared, or names the test that runs it. A line that
is not known here fails. Commands within the text must exist, with their flags. The programs in C++ and Python run, too."""
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

from commands import trouble

repository, programs, library = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2], pathlib.Path(sys.argv[3]).resolve()
readme = (repository / "README.md").read_text()
folder = pathlib.Path(tempfile.mkdtemp(prefix="mkernel-readme-"))
os.environ["PATH"] = programs + ":" + os.environ["PATH"]
started = []


def run(command, seconds=120):
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=seconds)
    return done.returncode, done.stdout + done.stderr


def expect(command, *patterns, status=0):
    got, output = run(command)
    assert got == status, f"{command}\nended with {got}:\n{output}"
    for pattern in patterns:
        assert re.search(pattern, output, re.M), f"{command}\nshows no '{pattern}':\n{output}"


# -- the fenced lines ----------------------------------------------------------------------------


def start(line):
    """A daemon that goes on."""
    assert line.endswith("&")
    command = line[:-1].replace("/tmp/", f"{folder}/")
    log = open(folder / "daemons.log", "a")
    started.append(subprocess.Popen(["bash", "-c", f"exec {command}"], stdout=log, stderr=log))


def status(line):
    command = line.replace("/tmp/", f"{folder}/")
    end = time.monotonic() + 60
    while run(command)[0] != 0 and time.monotonic() < end:
        time.sleep(0.1)
    expect(command, r"^node 0: ok", r"^ *1 .*\bup\b")


def write_tensor(name, key, rows, columns, dtype):
    """A safetensors file of small whole numbers."""
    values = [((row * 7 + column * 3) % 5) - 2 for row in range(rows) for column in range(columns)]
    data = b"".join(struct.pack("<f", value)[2:] if dtype == "BF16" else struct.pack("<f", value) for value in values)
    header = json.dumps({key: {"dtype": dtype, "shape": [rows, columns], "data_offsets": [0, len(data)]}}).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + data)
    return values


def own_tensors(line):
    m, n, k = 64, 96, 128
    a = write_tensor("acts.safetensors", "x", m, k, "F32")
    b = write_tensor("model.safetensors", "layers.0.weight", n, k, "BF16")  # as a linear layer keeps it: transposed
    expect(line, r"check|element")
    content = (folder / "y.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + length])
    (tensor,) = [value for key, value in header.items() if key != "__metadata__"]
    assert tensor["shape"] == [m, n] and tensor["dtype"] == "BF16", header
    data = content[8 + length:]
    for row in range(0, m, 7):  # the product's whole numbers stay below 256 * 2: bf16 rounds them by at most 1
        for column in range(0, n, 5):
            exact = sum(a[row * k + i] * b[column * k + i] for i in range(k))
            at = 2 * (row * n + column)
            (got,) = struct.unpack("<f", b"\0\0" + data[at:at + 2])
            assert abs(got - exact) <= abs(exact) * 2 ** -7 + 0.5, (row, column, got, exact)


def quickstart(line):
    """Its mkbench lines, small; the rest installs and builds, as tests/run.sh does before this."""
    text = (repository / line.split()[1]).read_text().replace("\\\n", " ")
    commands = re.findall(r"^build/release/\S*/(mkbench [^\n]*)$", text, re.M)
    assert len(commands) >= 3
    for command in commands:
        command = command.replace('"$@"', "--iters 1 --m 64")  # the caller's come last, and count
        if " all " in command:  # the sizes of `all` are its own, and take minutes: one of its operators
            command = re.sub(r" all ", " gemm-ar --m 256 --n 256 --k 64 ", command)
        command = re.sub(r"--(m|n|k) \d+", r"--\1 128", re.sub(r"--(iters|warmup) \d+", r"--\1 1", command))
        expect(command, r"fused", r"unfused")
    # Its last words on a machine that is small, busy, both or neither.
    (function,) = re.findall(r"^figures_mean\(\) {\n.*?^}\n", text, re.M | re.S)
    small, busy = "This machine is small, so speed-ups below 1 say little", r"\(load [0-9.]+ on [0-9]+ CPUs\), so the times mean little"
    for cpus, load, said in ((2, 0.1, [small]), (64, 40.5, [busy]), (4, 3.0, [small, busy]), (64, 0.3, [])):
        words = run(f"{function}figures_mean {cpus} {load}")[1]
        assert [one for one in (small, busy) if re.search(one, words)] == said, (cpus, load, words)


def elsewhere(path):
    def check(line):
        assert (repository / path).exists()
    return check


FENCED = [  # what a line begins with, and what becomes of it
    ("bash deploy/quickstart.sh", quickstart),
    ("bash tests/run.sh", elsewhere("tests/run.sh")),  # runs this
    ("mkerneld ", start),
    ("mkctl --address unix:/tmp/p0 status", status),
    ("mkrun gemm-ar --a acts.safetensors", own_tensors),
]


def fenced():
    lines = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", readme, re.M | re.S):
        if language in ("", "sh", "bash", "console"):
            lines += [re.sub(r"\s+# .*", "", line).strip() for line in block.splitlines() if line.strip()]
    assert len(lines) >= 4, "README.md shows no commands any more?"
    for line in lines:
        for beginning, check in FENCED:
            if line.startswith(beginning):
                check(line)
                break
        else:
            raise AssertionError(f"README.md shows a command that no test runs: add it to {__file__}:\n  {line}")
    return len(lines)


# -- programs ----------------------------------------------------------------------------------------


def program(language):
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", readme, re.M | re.S)
    return block


def run_cpp():
    """Compiled as it stands, then two ranks on the two nodes that the README's own commands started."""
    (folder / "readme.cc").write_text(program("cpp"))
    expect(f"c++ -std=c++20 -I {repository}/client/include -I {repository} readme.cc {library} -Wl,-rpath,{library.parent} -o readme")
    place = "MKERNEL_JOB=readme MKERNEL_WORLD_SIZE=2 MKERNEL_LOCAL_RANK=0 MKERNEL_LOCAL_SIZE=1"
    rank = [f"MKERNEL_SOCKET={folder}/c{number} MKERNEL_RANK={number} {place} ./readme" for number in (0, 1)]
    expect(f"{rank[1]} & {rank[0]}; first=$?; wait $!; second=$?; echo $first $second", r"^0 0$")
    expect("./readme", status=1)  # no launcher: from_environment() says so


def run_python():
    (folder / "readme.py").write_text(program("python"))
    environment = f"PYTHONPATH={repository}/client/python MKERNEL_LIBRARY={library} MKERNEL_BIN={programs}"
    expect(f"{environment} /usr/bin/python3 -m mkernel --nodes 2 --local 1 readme.py", r"\b0 \(64, 256\) 16384\.0", r"\b1 \(64, 256\) 16384\.0")


# -- commands within the text ----------------------------------------------------------------------


def within_text():
    text = re.sub(r"^```.*?^```", "", readme, flags=re.M | re.S)
    spans = re.findall(r"`((?:mkctl|mkbench|mkrun|mkerneld) [^`]+)`", text)
    for span in spans:
        assert not (wrong := trouble(span)), f"README.md says `{span}`, but {wrong}"
    return len(spans)


try:
    print(f"{fenced()} lines, {within_text()} commands within the text")
    run_cpp()
    run_python()
finally:
    for daemon in started:
        daemon.terminate()
    for daemon in started:
        daemon.wait()
    shutil.rmtree(folder)
