#!/usr/bin/env python3
"""Runs ctest over one build and counts single test cases.

  run_ctest.py BUILD NAME LOGS RESULT JOBS [CTEST_ARGUMENT...]

Cases are those of the XML that a GoogleTest binary wrote (BUILD/test-results/<entry>.xml), or the entry itself. An entry
that failed with no failed case in its XML (a crash, a time-out, a leak at exit) counts as one failed case.

What failed beside other tests is run once more, alone: a crowded machine is then told apart from a defect. It is said, and
said again in the summary, and counts as passed when the second run passes. There is no second run after a finding of a
sanitizer, which no load can cause, nor when more than AGAIN_MOST entries failed.

Standard output is for a person; RESULT gets "counts PASSED FAILED SKIPPED" and a line "failure TEXT" or "unsteady TEXT"
for each entry concerned. LOGS/tests-NAME.log and .xml hold ctest's own output.
"""
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

AGAIN_MOST = 3
SANITIZER = re.compile(r"ERROR: (Address|Leak)Sanitizer|WARNING: ThreadSanitizer|: runtime error: ")
TELLING = re.compile(r"Failure$|^FAILED|ERROR: |WARNING: ThreadSanitizer")


@dataclasses.dataclass
class Entry:
    """One entry of ctest: a GoogleTest binary or a script."""

    name: str
    passed: int
    failed: int
    skipped: int
    cases: list  # names of failed cases
    output: str

    def label(self):
        return self.name + (": " + " ".join(self.cases[:5]) if self.cases else "")


def read_entry(case, results):
    name, status = case.get("name"), case.get("status")
    skipped = case.find("skipped")
    left_out = skipped is not None and "SKIP_RETURN_CODE" in (skipped.get("message") or "")
    failing = status != "run" and not left_out
    output = case.findtext("system-out") or ""
    try:
        root = ElementTree.parse(results / f"{name}.xml").getroot()
    except (OSError, ElementTree.ParseError):
        return Entry(name, int(not failing and not left_out), int(failing), int(left_out), [], output)
    total, bad = int(root.get("tests", 0)), int(root.get("failures", 0)) + int(root.get("errors", 0))
    skip = sum(int(suite.get("skipped", 0)) + int(suite.get("disabled", 0)) for suite in root.iter("testsuite"))
    cases = [f"{one.get('classname')}.{one.get('name')}" for one in root.iter("testcase") if one.find("failure") is not None]
    passed = max(total - bad - skip, 0)
    return Entry(name, passed, bad or int(failing), skip, cases, output)


class Runner:
    def __init__(self, build, name, logs):
        self.build, self.name, self.logs = build, name, logs
        self.results = build / "test-results"

    def run(self, kind, arguments):
        """The entries that ctest ran, and its log."""
        log, junit = (self.logs / f"tests-{self.name}{kind}.{ending}" for ending in ("log", "xml"))
        junit.unlink(missing_ok=True)
        with open(log, "wb") as out:
            subprocess.run(["ctest", "--test-dir", str(self.build), "--output-on-failure", "--output-junit", str(junit),
                            *arguments], stdout=out, stderr=subprocess.STDOUT, check=False)
        if not junit.exists():
            return [], log
        return [read_entry(case, self.results) for case in ElementTree.parse(junit).getroot().iter("testcase")], log

    def again(self, entry):
        """What the entry says when nothing runs beside it; None when it did not pass."""
        xml = self.results / f"{entry.name}.xml"
        if xml.exists():
            xml.rename(self.logs / f"{entry.name}-first.xml")
        entries, _ = self.run(f"-again-{entry.name}", ["-j", "1", "-R", f"^{re.escape(entry.name)}$"])
        return entries[0] if len(entries) == 1 and entries[0].failed == 0 and entries[0].passed > 0 else None


def describe(entry, log):
    """What a failed entry said: on a machine that is gone after the run, the log is gone too."""
    print(f"  FAILED  {entry.label()} (log: {log})")
    lines = entry.output.splitlines()
    shown = []
    for at, line in enumerate(lines):
        if TELLING.search(line):
            shown += [n for n in range(at, min(at + 7, len(lines))) if n not in shown]
    for at in sorted(set(shown[:24]) | set(range(max(len(lines) - 12, 0), len(lines)))):
        print("  | " + lines[at][:300])


def main():
    build, logs = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[3])
    name, result, jobs, arguments = sys.argv[2], sys.argv[4], int(sys.argv[5]), sys.argv[6:]
    runner = Runner(build, name, logs)
    shutil.rmtree(runner.results, ignore_errors=True)
    runner.results.mkdir(parents=True)
    said = []
    # One more than there are cores: many tests mostly wait, for a death to be noticed or a link to come back.
    entries, log = runner.run("", ["-j", str(jobs + 1), *arguments])
    if not entries:
        print("\n".join(log.read_text(errors="replace").splitlines()[-20:]))
        entries = [Entry("ctest ran no test", 0, 1, 0, [], "")]
    bad = [entry for entry in entries if entry.failed]
    for entry in bad:
        describe(entry, log)
        second = None
        if len(bad) <= AGAIN_MOST and entry.name != "ctest ran no test" and not SANITIZER.search(entry.output):
            second = runner.again(entry)
        if second:
            print(f"  UNSTEADY  {entry.label()}: failed beside other tests, passed when run again, alone")
            said.append(f"unsteady {name}: {entry.label()}: {log}")
            entries[entries.index(entry)] = second
        else:
            said.append(f"failure {name}: {entry.label()}: {log}")
    counts = [sum(getattr(entry, field) for entry in entries) for field in ("passed", "failed", "skipped")]
    print("  {} passed, {} failed, {} skipped in {} binaries and scripts".format(*counts, len(entries)))
    with open(result, "w", encoding="utf-8") as out:
        out.write("counts {} {} {}\n".format(*counts) + "".join(line + "\n" for line in said))


if __name__ == "__main__":
    main()
