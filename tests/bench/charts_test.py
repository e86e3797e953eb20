#!/usr/bin/env python3
"""charts.py: that the committed charts are what it draws of the files, and that a bar is as high as its speed-up."""
import pathlib
import re
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import charts  # noqa: E402


class Charts(unittest.TestCase):
    def test_the_charts_are_those_of_the_files(self):
        for name in charts.CHARTS:
            self.assertEqual((charts.IMAGES / f"{name}.svg").read_text(encoding="utf-8"), charts.chart(name),
                             f"{name}.svg: run python3 tests/bench/charts.py")

    def test_a_bar_is_as_high_as_its_speed_up(self):
        text = charts.draw("T", [("A", "B", [("1K", 1.0)]), ("C", "D", [("1K", 2.0)])])
        bars = [float(height) for height in re.findall(r'height="([0-9.]+)" fill="#(?:3b6ea8|c77d2e)"', text)]
        self.assertEqual(len(bars), 4, "two bars and the two squares of the legend")
        self.assertAlmostEqual(max(bars) / sorted(bars)[-2], 2.0, places=2)


if __name__ == "__main__":
    unittest.main()
