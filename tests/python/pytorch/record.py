#!/usr/bin/env python3
"""record.py <results.xml> <python>: what a run of the stage `python` said, as text for RESULT.txt."""
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

cases = list(ElementTree.parse(sys.argv[1]).getroot().iter("testcase"))
names = ("torch", "transformers", "numpy", "ml-dtypes")
ask = f"import importlib.metadata as m, sys; print('Python', sys.version.split()[0], *(f', {{n}} {{m.version(n)}}' for n in {names}))"
versions = subprocess.run([sys.argv[2], "-c", ask], capture_output=True, text=True, check=True).stdout.strip().replace(" ,", ",")


def outcome(case):
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            return "failed" if child.tag != "skipped" else "skipped"
    return "passed"


counts = {kind: sum(outcome(case) == kind for case in cases) for kind in ("passed", "failed", "skipped")}
print("The last run of the stage `python`\n")
print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped. {versions}.\n")
print("    s  outcome  test")
for case in cases:
    print(f"{float(case.get('time', 0)):5.0f}  {outcome(case):8} {case.get('classname', '').split('.')[-1]}: {case.get('name', '')}")
