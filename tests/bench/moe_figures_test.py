#!/usr/bin/env python3
"""moe_figures.py: what a gain is over. page_figures_test.py holds the documents' tables to it."""
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import moe_figures  # noqa: E402


class MoeFigures(unittest.TestCase):
    def test_a_gain_is_over_torch_and_not_over_our_own_unfused_form(self):
        case = {"us": {"layer": {"median": 2.0}, "unfused_layer": {"median": 5.0}, "torch_layer": {"median": 3.0}}}
        self.assertAlmostEqual(moe_figures.gain(case, "layer"), 1.5)

    def test_every_result_was_right(self):
        for name in moe_figures.TABLES:
            for case in moe_figures.load(name)["cases"]:
                for part, worst in case["worst_over_bound"].items():
                    self.assertLessEqual(worst, 1, f"{case['case']} {part}")


if __name__ == "__main__":
    unittest.main()
