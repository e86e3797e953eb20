#!/usr/bin/env python3
"""page_figures.py: that the documents have the figures of the files, and that it finds one that is wrong."""
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import page_figures  # noqa: E402


class PageFigures(unittest.TestCase):
    def setUp(self):
        self.pages = page_figures.pages()
        self.page = self.pages["performance.md"]

    def changed(self, old, new):
        self.assertIn(old, self.page)
        return {**self.pages, "performance.md": self.page.replace(old, new)}

    def test_the_figures_of_the_pages_are_those_of_the_files(self):
        self.assertEqual(page_figures.missing(self.pages), [], "the page is wrong, or a figure has no place there")

    def test_every_row_of_a_table_comes_from_a_file(self):
        self.assertEqual(page_figures.rows_by_hand(self.page), [], "no function of page_figures.py gives it")

    def test_a_wrong_figure_in_a_table_and_in_prose(self):
        found = page_figures.missing(self.changed("| GEMM+AllReduce | 1.016, 1.09 |", "| GEMM+AllReduce | 1.015, 1.09 |"))
        self.assertEqual([function for _, function, _ in found], ["planner_choices"])
        found = page_figures.missing(self.changed("never below 1 | 0.96 to 1.35 on two", "never below 1 | 0.99 to 1.35 on two"))
        self.assertEqual([text for _, _, text in found], ["| never below 1 | 0.96 to 1.35 on two |"])

    def test_a_row_that_no_file_has(self):
        row = "| GEMM+AllReduce | 1.000, 1.00 | 1.000, 1.00 | 1.000, 1.00 | 1.000, 1.00 |"
        pages = self.changed("| GEMM+AllReduce | 1.016", row + "\n| GEMM+AllReduce | 1.016")
        self.assertEqual(page_figures.missing(pages), [])
        self.assertEqual(page_figures.rows_by_hand(pages["performance.md"]), [row])

    def test_a_page_may_break_lines_anywhere(self):
        text = self.page.replace("It takes 1.04 to", "It takes 1.04\nto")
        self.assertEqual(page_figures.missing({**self.pages, "performance.md": text}), [])

    def test_a_table_by_hand_is_on_the_page(self):
        for head in page_figures.BY_HAND:
            self.assertIn(head, self.page)


if __name__ == "__main__":
    unittest.main()
