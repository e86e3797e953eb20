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

    def test_a_partition_is_followed_from_launch_to_launch(self):
        path = [[4, 200.0], [8, 100.0], [8, 90.0]]
        row = {"best_static": "x2", "partitions": {
            "planned": {"us": {"median": 200.0}, "sms_that_communicate": 4},
            "x2": {"us": {"median": 100.0}, "sms_that_communicate": 8},
            "adaptive x1": {"us": {"median": 90.0}, "sms_that_communicate": 8, "sms_and_us_by_launch": path}}}
        text = charts.draw_partition("T", row)
        lines = [[tuple(map(float, point.split(","))) for point in points.split()] for points in re.findall(r'points="([^"]+)"', text)]
        best, steps, times = lines
        self.assertEqual(len(steps), 2 * len(path))
        self.assertGreater(steps[0][1], best[0][1], "fewer SMs than the best static partition has")
        self.assertAlmostEqual(steps[-1][1], best[0][1])
        # The last launch takes nine tenths of its time, where the axis ends.
        self.assertGreater(times[2][1], times[1][1])
        self.assertGreater(times[1][1], times[0][1])
        self.assertIn("from the planned one", text)


if __name__ == "__main__":
    unittest.main()
