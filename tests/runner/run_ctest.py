#!/usr/bin/env python3
"""Runs ctest over one build and writes down its single test cases.

  run_ctest.py NAME BUILD LOGS JOBS [CTEST_ARGUMENT...]

LOGS/NAME/cases.xml gets the cases (cases.py): those of the XML that a GoogleTest binary wrote (BUILD/test-results/<entry>.xml), or
the entry itself. An entry that failed with no failed case in its XML (a crash, a time-out, a leak at exit) is one failed case.
Among the arguments may be `--preset`, whose build folder is then BUILD. MK_LABEL is a regular expression: of the entries, only
those with a matching label run.

What failed beside other tests is run once more, alone: a crowded machine is then told apart from a defect. It counts as passed when
the second run passes, and is named as unsteady. There is no second run after a finding of a sanitizer, which no load can cause,
nor when more than AGAIN_MOST entries failed. LOGS/NAME-ctest.log has ctest's own output.

Ends with status 1 when a case failed.
"""
import os
import pathlib
import re
import subprocess
import sys
import time

from cases import Case, read, write

AGAIN_MOST = 3
SANITIZER = re.compile(r"ERROR: (Address|Leak)Sanitizer|WARNING: ThreadSanitizer|: runtime error: ")
TELLING = re.compile(r"Failure$|^FAILED|ERROR: |WARNING: ThreadSanitizer")


def run(build, log, arguments):
    """What ctest says of each entry: (case of the entry, its single cases)."""
    results, junit, began = build / "test-results", log.with_suffix(".xml"), time.time()
    results.mkdir(parents=True, exist_ok=True)
    junit.unlink(missing_ok=True)
    place = [] if "--preset" in arguments else ["--test-dir", str(build)]
    with open(log, "wb") as out:
        subprocess.run(["ctest", *place, "--output-on-failure", "--output-junit", str(junit), *arguments],
                       stdout=out, stderr=subprocess.STDOUT, check=False)
    entries = []
    for entry in read(junit):
        file = results / f"{entry.name}.xml"
        fresh = file.exists() and file.stat().st_mtime >= began - 1
        single = [Case(entry.name, f"{one.program}.{one.name}", one.outcome) for one in (read(file) if fresh else [])]
        if not single or (entry.outcome == "failed" and all(one.outcome != "failed" for one in single)):
            single.append(Case(entry.name, "", entry.outcome))
        entries.append((entry, single))
    return entries


def describe(entry, single, log):
    """What a failed entry said: on a machine that is gone after the run, the log is gone too."""
    print(f"FAILED  {entry.name}", *[one.name for one in single if one.outcome == "failed"][:5], f"(log: {log})")
    lines = entry.text.splitlines()
    shown = []
    for at, line in enumerate(lines):
        if TELLING.search(line):
            shown += [n for n in range(at, min(at + 7, len(lines))) if n not in shown]
    for at in sorted(set(shown[:24]) | set(range(max(len(lines) - 12, 0), len(lines)))):
        print("  | " + lines[at][:300])


def main():
    name, build, logs, jobs = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]).resolve(), int(sys.argv[4])
    arguments = sys.argv[5:]
    if os.environ.get("MK_LABEL"):
        arguments += ["-L", os.environ["MK_LABEL"]]
    log = logs / f"{name}-ctest.log"
    # More than there are cores: many tests mostly wait, for a death to be noticed or a link to come back.
    entries = run(build, log, [*arguments, "-j", str(jobs + 2)])
    if not entries:
        print("\n".join(log.read_text(errors="replace").splitlines()[-20:]))
        entries = [(Case("", "ctest", "failed"), [Case("ctest", "ran no test", "failed")])]
    again = entries[0][0].name != "ctest" and sum(entry.outcome == "failed" for entry, _ in entries) <= AGAIN_MOST
    cases = []
    for entry, single in entries:
        if entry.outcome == "failed":
            describe(entry, single, log)
            second = []
            if again and not SANITIZER.search(entry.text):
                second = run(build, logs / f"{name}-again-{entry.name}.log", [*arguments, "-j", "1", "-R", f"^{re.escape(entry.name)}$"])
            if second and second[0][0].outcome == "passed":
                print(f"UNSTEADY  {entry.name}: failed beside other tests, passed when run again, alone")
                first = {one.name for one in single if one.outcome == "failed"}
                single = second[0][1]
                for one in single:
                    if one.outcome == "passed" and (one.name in first or "" in first):
                        one.outcome, one.text = "unsteady", str(log)
        cases += single
    for case in cases:
        if case.outcome == "failed":
            case.text = str(log)
    (logs / name).mkdir(parents=True, exist_ok=True)
    write(logs / name / "cases.xml", cases)
    counts = {outcome: sum(case.outcome == outcome for case in cases) for outcome in ("passed", "failed", "skipped", "unsteady")}
    print("{} passed, {failed} failed, {skipped} skipped in {} binaries and scripts".format(
        counts["passed"] + counts["unsteady"], len(entries), **counts))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
