#!/usr/bin/env python3
"""Says what came of a run: what each step of tests/stages counted, all that failed, and last "N passed, N failed".

  report.py LOGS SECONDS STAGES [FAILED_STEP...]

LOGS/steps.xml is ctest's word on each step. A step's cases are in LOGS/<step>/*.xml (cases.py); a step without any is one case itself.
A step that failed with no failed case is one failed case. Steps that only prepare others (PREPARES) count when they fail.
A line "left out: REASON" of a step's output is something that could not run here. FAILED_STEP: failed before ctest could run.

Ends with status 1 when something failed.
"""
import collections
import pathlib
import sys

from cases import Case, read

PREPARES = ("tools-", "configure-", "build-")


def cases_of(step, logs):
    found = [case for file in sorted((logs / step.name).glob("*.xml")) for case in read(file)]
    if step.outcome == "failed" and all(case.outcome != "failed" for case in found):
        found.append(Case(step.name, "", "failed"))
    elif not step.name.startswith(PREPARES) and (step.outcome == "skipped" or not found):
        found.append(Case(step.name, "", step.outcome))
    return found


def listed(title, lines):
    if lines:
        print(title, *(f"  {line}" for line in lines), sep="\n")


def main():
    logs, seconds, stages = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    steps = read(logs / "steps.xml") + [Case("", name, "failed") for name in sys.argv[4:]]
    total, said, left_out = collections.defaultdict(collections.Counter), collections.defaultdict(list), []
    for step in steps:
        cases = cases_of(step, logs)
        for case in cases:
            for key in (step.name.split(".")[0], ""):
                total[key]["passed" if case.outcome == "unsteady" else case.outcome] += 1
        for outcome in ("failed", "unsteady"):
            programs = collections.defaultdict(list)
            for case in cases:
                if case.outcome == outcome:
                    programs[case.program, case.text.splitlines()[0] if case.text else ""].append(case.name)
            for (program, log), names in programs.items():
                what = " ".join([*([program] if program != step.name else []), *filter(None, names[:5])])
                said[outcome].append(f"{step.name}:{what and ' '}{what} (log: {log or logs / (step.name + '.log')})")
        left_out += [f"{step.name}: {line[10:]}" for line in step.text.splitlines() if line.startswith("left out: ")]
    print()
    for step, count in total.items():
        if step:
            print(f"  {step:16}{count['passed']:6} passed {count['failed']:5} failed {count['skipped']:5} skipped")
    count = total[""]
    listed("Failures:", said["failed"])
    listed("Failed beside other tests, passed when run again, alone:", said["unsteady"])
    listed("Stages that could not run here:", left_out)
    print(f"Took {seconds} s; skipped {count['skipped']}.")
    if count["passed"] + count["failed"] == 0:
        print(f"Nothing was checked by: {stages}")
    print(f"{count['passed']} passed, {count['failed']} failed")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
