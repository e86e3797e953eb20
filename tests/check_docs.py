#!/usr/bin/env python3
"""check_docs.py [--fix] [REPOSITORY]: the documents miss nothing that a user may look up, and name nothing that is not there.

- deploy/docs/troubleshooting.md has a section for every error code, a row for every check of the doctor, and a row for every flag
  that a wait may name. deploy/docs/operations.md has a row for every alert, and the beginning of every metric's name.
- deploy/docs/api/cpp.md has every public declaration of the headers, and every operator's class promises which bits are equal.
  deploy/docs/api/python.md has every public name of the Python packages, and every environment variable that they read.
- The bounds in deploy/mkerneld.toml.example are those of the code.
- A block with `install-deps.sh --build` configures without tests, and these packages are enough for what it calls.
- A document, a program or the planner's tests use each file of tests/bench/results.
- A link to a line, [`name`](file#L12), leads to a line that has the name. --fix sets the number right.
- A block after "From [`file`](path):" is in that file.
- A decision record has at most 40 lines, README.md at most 150. A chart of one claim names the program that draws it.

check_docs_test.py shows that each of these is found.
"""
import ast
import functools
import os
import pathlib
import re
import subprocess
import sys

# What the planner's tests read, by the pattern of tests/kernels/plan/CMakeLists.txt.
PLANNER = r"(operators|choices)_h[12]00_.*\.json"
RECORD_LINES, README_LINES = 40, 150


@functools.cache
def names_in(path):
    """The words of a file that may name a file of results, with their suffixes and without."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return {word for name in re.findall(r"\b[a-z]\w*(?:\.json|\.svg)|\b[a-z]\w*_\w*", text) for word in (name, name.partition(".")[0])}


class Repository:
    def __init__(self, root):
        self.root, self.breaches, self.moved = root, [], []
        listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True)
        self.files = [name for name in listed.stdout.split("\n") if name and (root / name).exists()]

    def text(self, name):
        return (self.root / name).read_text(encoding="utf-8", errors="replace")

    def compare(self, page, kind, known, there):
        """Both lists must be the same."""
        self.breaches += [f"{page}: no {kind}: {name}" for name in sorted(known - there)]
        self.breaches += [f"{page}: {kind} that does not exist: {name}" for name in sorted(there - known)]

    def found(self, what, names, least):
        """Names taken from sources. Few of them mean that this check no longer finds them."""
        if len(names) < least:
            self.breaches.append(f"found only {len(names)} of {what}: has their source moved?")
        return set(names)

    def troubleshooting(self):
        name = "deploy/docs/troubleshooting.md"
        page = self.text(name)
        codes = self.found("the error codes", re.findall(r'return "([a-z-]+)";', self.text("shm/error_code.h")), 20) - {"unknown"}
        checks = self.found("the doctor's checks", re.findall(r'(?:Finding finding\{|about_ports\(|return \{)\s*"([a-z]+\.[a-z_]+)"',
                                                              self.text("daemon/doctor/checks.cc")), 15)
        waits = re.findall(r'"(?:flag ([a-z-]+)|(commands [a-z]+))', self.text("kernels/comm/wait_text.cc"))
        flags = self.found("the flags of waits", ["".join(one) for one in waits], 16)
        self.compare(name, "section of an error code", codes, set(re.findall(r"^### (\S+)$", page, re.M)))
        self.compare(name, "row of a doctor check", checks, set(re.findall(r"^\| `([a-z]+\.[a-z_]+)` \|", page, re.M)))
        table = page.partition("| flag | what is missing |")[2].partition("\n\n")[0]
        self.compare(name, "flag of a wait", flags, {one for row in table.splitlines()[2:] for one in re.findall(r"`([^`]+)`", row.split("|")[1])})

    def operations(self):
        name = "deploy/docs/operations.md"
        alerts = self.found("the alerts", re.findall(r"- alert: (\w+)", self.text("deploy/prometheus/mkernel.rules.yml")), 10)
        self.compare(name, "row of an alert", alerts, set(re.findall(r"^\| `(Mkernel\w+)` \|", self.text(name), re.M)))
        sources = "\n".join(self.text(one) for one in self.files if re.fullmatch(r"daemon/metrics/\w+\.cc", one))
        metrics = self.found("the metrics", re.findall(r'"(mkernel_\w+)"', sources), 40)
        table = self.text(name).partition("| metrics that begin with |")[2].partition("\n\n")[0]
        beginnings = tuple(re.findall(r"`(mkernel_\w+)`", table))
        self.breaches += [f"{name}: no row for the metric {one}" for one in sorted(metrics) if not one.startswith(beginnings)]
        self.breaches += [f"{name}: no metric begins with {one}" for one in beginnings if not any(metric.startswith(one) for metric in metrics)]

    def headers(self):
        name = "deploy/docs/api/cpp.md"
        declared = []
        for header in self.files:
            if header.startswith("client/include/mkernel/") and not header.endswith("_c.h"):
                text = self.text(header)
                declared += re.findall(r"^(?:struct|class|enum class) (?:MK_EXPORT )?(\w+)[ :]", text, re.M)
                declared += re.findall(r"^using (\w+) =", text, re.M)
                declared += re.findall(r"^(?:constexpr|MK_EXPORT) [^(=]*?(\w+)\(", text, re.M)
                promise = re.search(r"^class MK_EXPORT \w+", text, re.M)
                if promise and "create(Session&" in text and "bitwise" not in text:
                    self.breaches.append(f"{header}: it does not say which results are bitwise equal")
                elif promise and "create(Session&" in text and "batch_invariant" not in text:
                    self.breaches.append(f"{header}: it does not promise batch invariance")
        declared = self.found("the public declarations", declared, 30)
        self.compare(name, "directive for", declared, set(re.findall(r"^\.\. doxygen\w+:: mk::(\w+)$", self.text(name), re.M)))

    def python(self):
        name = "deploy/docs/api/python.md"
        page = re.sub(r"^```.*?^```", "", self.text(name), flags=re.M | re.S)
        said = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page))))
        for package in ("client/python/mkernel/__init__.py", "client/python/mkernel/torch/__init__.py"):
            for node in ast.walk(ast.parse(self.text(package))):
                if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
                    public = self.found(f"the names of {package}", ast.literal_eval(node.value), 15)
                    self.breaches += [f"{name}: no mention of {one}" for one in sorted(public - said) if not one.startswith("__")]
        sources = "\n".join(self.text(one) for one in self.files if one.startswith("client/python/mkernel/") and one.endswith(".py"))
        read = self.found("the environment variables of Python", re.findall(r'environ(?:\.get\(|\[)"(MKERNEL_\w+)"', sources), 2)
        self.breaches += [f"{name}: no mention of {one}" for one in sorted(read - said)]

    def example(self):
        name = "deploy/mkerneld.toml.example"
        nodes = int("".join(re.findall(r"kNodesMax = (\d+);", self.text("shm/limits.h"))) or 0)
        own = int("".join(re.findall(r"kOwnDescriptorsMax = (\d+) \* shm::kNodesMax;", self.text("daemon/config/client_limits.cc"))) or 0)
        self.found("the bounds of the example", [one for one in (nodes, own) if one], 2)
        for said in (f"another one, from 0 to {nodes - 1}. ", f"less a quarter, at most {own * nodes}\n"):
            if said not in self.text(name):
                self.breaches.append(f"{name}: it does not say: {said.strip()}")

    def builds(self):
        packages = re.search(r"^build_packages=\((.*?)\)", self.text("deploy/install-deps.sh"), re.M | re.S)
        installed = self.found("the packages of --build", packages.group(1).split() if packages else [], 20)
        # CPack's shlibdeps calls `file`, and wheels.sh makes an environment.
        needs = {"--target package": "file", "deploy/wheels.sh": "python3-venv", "-m venv": "python3-venv"}
        blocks = [(name, block) for name in self.files if name.startswith("deploy/docs/") and name.endswith(".md")
                  for block in re.findall(r"^```sh\n(.*?)^```", self.text(name), re.M | re.S) if "install-deps.sh --build\n" in block]
        self.found("the blocks that install and build", blocks, 2)
        for name, block in blocks:
            for line in re.findall(r"cmake --preset release.*", block):
                if "-DMK_TESTS=OFF -DMK_BENCH=OFF" not in line:
                    self.breaches.append(f"{name}: --build installs no libraries for tests: {line}")
            self.breaches += [f"{name}: --build does not install {package}: {call}" for call, package in needs.items() if call in block and package not in installed]

    def results(self):
        # The folder's own page says how files were made, which is no use.
        users = [name for name in self.files if name.endswith((".md", ".py", ".sh", ".txt", ".cc", ".h")) and
                 name != "tests/bench/results/README.md"]
        said = set().union(*(names_in(self.root / name) for name in users))
        patterns = [re.compile(one.replace("*", r"\w*")) for name in users if name.endswith(".md")
                    for one in re.findall(r"`([\w*]*\*[\w*]*)\.json`", self.text(name))]
        for name in self.files:
            file = pathlib.PurePosixPath(name)
            if name.startswith("tests/bench/results/") and file.suffix in (".json", ".svg") and not re.fullmatch(PLANNER, file.name):
                # A stem of one word, such as "proxy", says nothing without its suffix.
                sought = file.stem if "_" in file.stem else file.name
                if sought not in said and not any(pattern.fullmatch(file.stem) for pattern in patterns):
                    self.breaches.append(f"{name}: no document and no program uses it: leave it out")

    def lines(self):
        """A symbol's definition comes before its uses, as a rule; where it moved, the line nearest to the old one is meant."""
        links = 0
        for name in [one for one in self.files if one.endswith(".md")]:
            for symbol, target, line in re.findall(r"\[`(\w+)`\]\(([^)#]+)#L(\d+)\)", self.text(name)):
                links += 1
                file = os.path.normpath(os.path.join(os.path.dirname(name), target))
                there = [number for number, text in enumerate(self.text(file).split("\n"), 1) if re.search(rf"\b{symbol}\b", text)]
                if int(line) not in there:
                    nearest = min(there, key=lambda number: abs(number - int(line)), default=None)
                    self.moved.append((name, f"[`{symbol}`]({target}#L{{}})", line, nearest))
                    self.breaches.append(f"{name}: `{symbol}` is not at line {line} of {file}" + (f", but at {nearest}: run check_docs.py --fix" if nearest else ""))
        self.found("the links to lines", range(links), 20)

    def fix_lines(self):
        for name, link, line, nearest in self.moved:
            if nearest:
                (self.root / name).write_text(self.text(name).replace(link.format(line), link.format(nearest)), encoding="utf-8")

    def excerpts(self):
        excerpts = 0
        for name in [one for one in self.files if one.startswith("deploy/docs/") and one.endswith(".md")]:
            for target, block in re.findall(r"From \[`[\w.]+`\]\(([^)]+)\):\n\n```cpp\n(.*?)```", self.text(name), re.S):
                excerpts += 1
                if block not in self.text(os.path.normpath(os.path.join(os.path.dirname(name), target))):
                    self.breaches.append(f"{name}: an excerpt is not in {target}: {block.splitlines()[0]}")
        self.found("the excerpts", range(excerpts), 5)

    def lengths(self):
        bounds = {name: RECORD_LINES for name in self.files if re.fullmatch(r"kernels/cuda/decisions/.*\.md", name)}
        self.found("the decision records", bounds, 15)
        for name, most in {**bounds, "README.md": README_LINES}.items():
            if (lines := self.text(name).count("\n")) > most:
                self.breaches.append(f"{name}: {lines} lines, at most {most}")

    def check(self):
        for check in (self.troubleshooting, self.operations, self.headers, self.python, self.example, self.builds, self.results, self.lines, self.excerpts, self.lengths):
            check()
        return self.breaches


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--fix"]
    root = pathlib.Path(given[0]) if given else pathlib.Path(__file__).resolve().parents[1]
    repository = Repository(root)
    breaches = repository.check()
    if "--fix" in sys.argv:
        repository.fix_lines()
        breaches = Repository(root).check()
    print("\n".join(breaches), end="\n" if breaches else "")
    sys.exit(1 if breaches else 0)
