#!/usr/bin/env python3
"""ring_figures.py: that the picture is what it makes of the file. page_figures_test.py holds the documents' tables to it."""
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import ring_figures  # noqa: E402


class RingFigures(unittest.TestCase):
    def test_a_gain_is_over_the_faster_baseline(self):
        cells = [row.split(" | ") for row in ring_figures.table("ring_h200_2x1").splitlines()[2:]]
        for row in cells:
            fused, gather, ring = (float(cell) for cell in row[1:4])
            self.assertAlmostEqual(float(row[5].removesuffix("×")), min(gather, ring) / fused, delta=0.02)

    def test_the_picture(self):
        committed = (ring_figures.RESULTS / ring_figures.TRACE_PICTURE).read_text(encoding="utf-8")
        self.assertEqual(committed, ring_figures.trace_picture())

    def test_every_result_was_right(self):
        for name in (*ring_figures.TABLES, "ring_h200_1x1"):
            for case in ring_figures.load(name)["cases"]:
                self.assertLessEqual(case["worst_over_bound"], 1, case["case"])


if __name__ == "__main__":
    unittest.main()
