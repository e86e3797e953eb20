#!/usr/bin/env python3
"""check_security.py: every test that deploy/docs/security.md names is one. `Suite.Name`, `Suite.*` and `Suite.Begin...` name tests;
`...Middle...` one of the suite named before it."""
import pathlib
import re
import sys

root = pathlib.Path(__file__).resolve().parents[1]
tests = set()
for source in (root / "tests").rglob("*_test.cc"):
    tests |= {f"{suite}.{name}" for suite, name in re.findall(r"\bTEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", source.read_text())}

missing = 0
suite = ""
for name in re.findall(r"`((?:[A-Z]\w+\.|\.\.\.)[A-Z]\w*(?:\.\.\.)?|[A-Z]\w*\*|[A-Z]\w+\.\*)`", (root / "deploy/docs/security.md").read_text()):
    if name.startswith("..."):
        pattern = rf"{suite}\.\w*" + re.escape(name.strip(".")) + (r"\w*" if name.endswith("...") else "")
    else:
        suite = name.split(".")[0]
        pattern = re.escape(name).replace(r"\.\.\.", r"\w*").replace(r"\*", r"[\w.]*")
    if not any(re.fullmatch(pattern, test) for test in tests):
        print(f"deploy/docs/security.md: there is no test {name}")
        missing += 1
sys.exit(1 if missing or not suite else 0)
