#!/usr/bin/env python3
"""collectives_baseline.py on the CPU, over gloo: it judges what it times, and sees one wrong element."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
except ImportError:
    print("skipped: no PyTorch")
    sys.exit(77)
if int(torch.__version__.split(".", maxsplit=1)[0]) < 2:  # as Debian 12's
    print(f"skipped: gloo of PyTorch {torch.__version__} has no all_gather_into_tensor")
    sys.exit(77)

SCRIPT = pathlib.Path(__file__).resolve().parent / "collectives_baseline.py"


class Baseline(unittest.TestCase):
    def run_it(self, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "rows.json"
            ended = subprocess.run([sys.executable, SCRIPT, "--backend", "gloo", "--launches", "2", "--lead", "1", "--json", path,
                                    *arguments], timeout=120, capture_output=True, text=True, check=False)
            return ended, json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def test_both_are_right_of_each_type_and_number_of_ranks(self):
        for dtype, devices in (("bf16", "2"), ("f16", "3"), ("f32", "1")):
            ended, found = self.run_it("--devices", devices, "--dtype", dtype, "--shape", "12x40", "--shape", "6x8")
            self.assertEqual(ended.returncode, 0, ended.stderr)
            self.assertEqual([(row["op"], row["m"], row["n"]) for row in found["rows"]],
                             [(op, m, n) for m, n in ((12, 40), (6, 8)) for op in ("all-gather", "reduce-scatter")])
            for row in found["rows"]:
                self.assertEqual(row["wrong"], 0)
                self.assertGreater(row["least_us"], 0)
                self.assertLessEqual(row["least_us"], row["median_us"])
            self.assertEqual(found["machine"]["device"], "cpu")
            self.assertEqual(ended.stdout.count("| 0 wrong"), 4)

    def test_a_wrong_element_is_seen(self):
        ended, found = self.run_it("--devices", "2", "--shape", "4x8", "--spoil")
        self.assertEqual(ended.returncode, 1, ended.stderr)
        self.assertEqual([row["wrong"] for row in found["rows"]], [1, 1])

    def test_shares_that_are_not_equal_are_refused(self):
        ended, found = self.run_it("--devices", "2", "--shape", "5x8")
        self.assertEqual(ended.returncode, 2)
        self.assertIn("2 ranks do not divide 5 rows", ended.stderr)
        self.assertIsNone(found)


if __name__ == "__main__":
    unittest.main()
