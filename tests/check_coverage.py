#!/usr/bin/env python3
"""Line coverage of a build made with gcc --coverage, after its tests have run.

  check_coverage.py BUILD MINIMUM_PERCENT FOLDER...

Runs gcov on every object of the build, adds the counts of each source line over all objects that hold it (headers are in
many), prints one line per folder and its least covered files, and fails when the lines of all FOLDERs together are covered
to less than MINIMUM_PERCENT.
"""
import collections
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def lines_of(data_file):
    """(path, line, count) of all lines of our own sources that one object holds."""
    out = subprocess.run(["gcov", "--json-format", "--stdout", data_file], capture_output=True, check=False,
                         cwd=os.path.dirname(data_file)).stdout
    found = []
    for text in out.splitlines():
        report = json.loads(text)
        for source in report["files"]:
            path = pathlib.Path(report["current_working_directory"], source["file"]).resolve()
            if path.is_relative_to(ROOT):
                name = str(path.relative_to(ROOT))
                found += [(name, line["line_number"], line["count"]) for line in source["lines"]]
    return found


def main():
    build, minimum, folders = pathlib.Path(sys.argv[1]).resolve(), float(sys.argv[2]), tuple(f + "/" for f in sys.argv[3:])
    # A source that no test links counts with all its lines: its notes are there, its data is not.
    notes = [str(path) for path in build.rglob("*.gcno")]
    files = [note[:-5] + ".gcda" if os.path.exists(note[:-5] + ".gcda") else note for note in notes]
    counts = collections.defaultdict(lambda: collections.defaultdict(int))
    with multiprocessing.Pool() as pool:
        for found in pool.imap_unordered(lines_of, files, chunksize=4):
            for name, line, count in found:
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
