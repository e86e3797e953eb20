#!/usr/bin/env python3
"""check_docs.py: the documents miss nothing that a user may look up.

deploy/docs/troubleshooting.md has a section for every error code and a row for every check of the doctor."""
import pathlib
import re
import sys

root = pathlib.Path(__file__).resolve().parents[1]
breaches = []

page = (root / "deploy/docs/troubleshooting.md").read_text(encoding="utf-8")
codes = re.findall(r'return "([a-z-]+)";', (root / "shm/error_code.h").read_text(encoding="utf-8"))
checks = set(re.findall(r'(?:Finding finding\{|about_ports\(|return \{)\s*"([a-z]+\.[a-z_]+)"',
                        (root / "daemon/doctor/checks.cc").read_text(encoding="utf-8")))
if len(codes) < 20 or len(checks) < 15:
    breaches.append(f"found only {len(codes)} error codes and {len(checks)} doctor checks: has their source moved?")
sections = set(re.findall(r"^### (\S+)$", page, re.M))
rows = set(re.findall(r"^\| `([a-z]+\.[a-z_]+)` \|", page, re.M))
for kind, known, there in (("section of an error code", set(codes) - {"unknown"}, sections), ("row of a doctor check", checks, rows)):
    breaches += [f"deploy/docs/troubleshooting.md: no {kind}: {name}" for name in sorted(known - there)]
    breaches += [f"deploy/docs/troubleshooting.md: {kind} that does not exist: {name}" for name in sorted(there - known)]

print("\n".join(breaches), end="\n" if breaches else "")
sys.exit(1 if breaches else 0)
