#!/usr/bin/env python3
"""Line coverage of a build made with MK_COVERAGE=ON (clang), after its tests have run.

  check_coverage.py BUILD MINIMUM_PERCENT FOLDER...

Adds up what all processes of the tests wrote to BUILD/coverage, prints one line per folder and its least covered files, and
fails when the lines of all FOLDERs together are covered to less than MINIMUM_PERCENT. The lines are those that the programs
and the client's library are made of; a function's counts are found by its name, whichever process ran it.
"""
import collections
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


PRODUCTS = ("daemon/mkerneld", "daemon/mkctl/mkctl", "client/tools/mkrun/mkrun", "client/libmkclient.so")


def lines_of(build):
    """(name, line, count) of every line of our own sources."""
    profiles = [str(path) for path in (build / "coverage").glob("*.profraw")]
    if not profiles:
        sys.exit(f"no *.profraw in {build / 'coverage'}: run the build's tests first")
    merged = build / "coverage" / "all.profdata"
    subprocess.run(["llvm-profdata-14", "merge", "-sparse", "-failure-mode=all", "-o", merged, *profiles], check=True)
    objects = [word for path in PRODUCTS for word in ("-object", str(build / path))]
    report = subprocess.run(["llvm-cov-14", "export", "-format=lcov", "-instr-profile", merged, *objects[1:]],
                            stdout=subprocess.PIPE, check=True, text=True).stdout
    name = None
    for text in report.splitlines():
        kind, _, rest = text.partition(":")
        if kind == "SF":
            path = pathlib.Path(rest).resolve()
            name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None
        elif kind == "DA" and name:
            line, count = rest.split(",")[:2]
            yield name, int(line), int(count)


def main():
    build, minimum, folders = pathlib.Path(sys.argv[1]).resolve(), float(sys.argv[2]), tuple(f + "/" for f in sys.argv[3:])
    counts = collections.defaultdict(lambda: collections.defaultdict(int))
    for name, line, count in lines_of(build):
        if name.startswith(folders):
            counts[name][line] += count
    totals = collections.defaultdict(lambda: [0, 0])
    of_file = []
    for name, lines in counts.items():
        covered = sum(1 for count in lines.values() if count > 0)
        of_file.append((covered / len(lines), len(lines), name))
        parts = name.split("/")
        for key in {parts[0], "/".join(parts[:2]) if len(parts) > 2 else parts[0], ""}:
            totals[key][0] += covered
            totals[key][1] += len(lines)
    for key in sorted(totals):
        covered, lines = totals[key]
        if key:
            print(f"{100 * covered / lines:6.1f} %  {covered:6} of {lines:6} lines  {key}")
    print("least covered, of files with 20 lines or more:")
    for share, lines, name in sorted(entry for entry in of_file if entry[1] >= 20)[:15]:
        print(f"{100 * share:6.1f} %  {lines:6} lines  {name}")
    covered, lines = totals[""]
    percent = 100 * covered / lines if lines else 0
    print(f"line coverage: {percent:.1f} % of {lines} lines; at least {minimum:g} % is wanted")
    return 0 if percent >= minimum else 1


sys.exit(main())
