#!/usr/bin/env python3
"""operator_tables.py: what it makes of a document."""
import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import operator_tables  # noqa: E402


def printed(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        operator_tables.main(list(arguments))
    return out.getvalue()


def cells(text):
    """Of each table row its cells after the first, whose words a README may choose."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.strip().startswith("|")]
    return [tuple(cell.strip() for cell in row[1:]) for row in rows]


def row(op, m, fused, baseline, share, nodes=1, **more):
    shape = {"n_per_rank": 7168, "k_per_rank": 8192} if op == "ag_gemm" else {"n_per_rank": 8192, "k_per_rank": 3584}
    times = {"fused_us": fused, "baseline_us": baseline, "products_us": 1.0, "collective_us": 2.0, "unfused_us": 3.0}
    bound = "of_max_products_collective" if nodes == 1 else "of_max_products_nvlink_network"
    return {"op": op, "nodes": nodes, "m": m, **shape, **{key: {"median": value} for key, value in times.items()},
            "speedup": baseline / fused, bound: share, "network_us": 4.0, **more}


class OperatorTables(unittest.TestCase):
    def document(self, *rows):
        file = tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8")
        self.addCleanup(file.close)
        json.dump({"gpu": "G", "devices": 2, "ranks": "R", "network": "none", "rows": rows}, file)
        file.flush()
        return file.name

    def test_gain_and_share_by_operator_and_m(self):
        text = printed(self.document(row("gemm_rs", 4096, 2.0, 3.0, 0.8), row("gemm_rs", 2048, 4.0, 3.0, 0.5)))
        self.assertIn("| M | 2048 | 4096 |", text)
        self.assertIn(("0.75× (50%)", "1.50× (80%)"), cells(text))

    def test_in_place_is_a_row_of_its_own(self):
        shard = {"in_place_us": {"median": 2.0}, "speedup_in_place": 3.0}
        text = printed(self.document(row("ag_gemm", 2048, 4.0, 6.0, 0.4, nodes=2, **shard)))
        self.assertEqual(cells(text)[2:], [("1.50× (40%)",), ("3.00× (80%)",)])

    def test_rows_without_a_baseline_are_left_out(self):
        alone = row("gemm_ar", 8192, 1.0, 1.0, 1.0)
        del alone["speedup"]
        text = printed(self.document(row("gemm_ar", 4096, 1.0, 2.0, 0.9), alone))
        self.assertNotIn("8192 |", text)
        with self.assertRaisesRegex(SystemExit, "no row has a baseline"):
            printed(self.document(alone))

    def test_a_shape_of_no_series_is_not_taken_for_one(self):
        other = {**row("gemm_rs", 4096, 1.0, 2.0, 0.9), "k_per_rank": 1024}
        with self.assertRaisesRegex(SystemExit, "4096 x 8192 x 1024 is of no series"):
            printed(self.document(other))
        self.assertIn("4096 x 8192 x 1024", printed("--times", self.document(other)))

    def test_alone_each_side_at_its_own_clock(self):
        times = {f"{what}_us": {"median": value} for what, value in (("fused", 8.0), ("products", 7.0), ("baseline", 12.0))}
        both = row("gemm_rs", 4096, 2.0, 3.0, 0.8, alone={**times, "speedup": 1.5})
        text = printed("--alone", self.document(row("gemm_rs", 2048, 4.0, 3.0, 0.5), both))
        self.assertEqual(cells(text)[2:], [("2", "1.50", "8", "7", "12", "1.50")])
        with self.assertRaisesRegex(SystemExit, "no row was measured alone"):
            printed("--alone", self.document(row("gemm_rs", 2048, 4.0, 3.0, 0.5)))

    def test_mirrored_beside_what_as_many_gpus_took(self):
        bound = {"of_max_products_nvlink_network": 0.8, "ranks": 8}
        mirrored = {**row("gemm_rs", 4096, 2.0, 9.0, 0.8), **bound}
        del mirrored["speedup"], mirrored["baseline_us"]
        real = {**row("gemm_rs", 4096, 2.5, 3.0, 0.7), "ranks": 8}
        text = printed("--mirrored", self.document(mirrored), self.document(real))
        self.assertEqual(cells(text)[2:], [("2", "1", "0.80", "2", "3", "1.50")])
        in_place = {**mirrored, "in_place_us": {"median": 1.0}}
        text = printed("--mirrored", self.document(in_place), self.document(real))
        self.assertEqual(cells(text)[2:], [("2", "1", "1", "0.80", "2", "3", "1.50", "3.00")])
        with self.assertRaisesRegex(SystemExit, "of 8 ranks was not measured without a mirror"):
            printed("--mirrored", self.document(mirrored), self.document({**real, "ranks": 4}))

    def test_mirrored_gains_are_those_over_the_unfused_form_there(self):
        real = {**row("ag_gemm", 8192, 2.5, 6.0, 0.7, nodes=2), "ranks": 8}
        mirrored = {**row("ag_gemm", 8192, 4.0, 9.0, 0.4, nodes=2), "ranks": 8, "in_place_us": {"median": 2.0}}
        del mirrored["speedup"], mirrored["baseline_us"]
        text = printed("--mirrored-gains", self.document(mirrored), self.document(real))
        self.assertEqual(cells(text)[2:], [("1.50× (40%)",), ("3.00× (80%)",)])
        self.assertIn("gain at the best shape, 1.41 at least | 3.00 | yes",
                      printed("--mirrored-goals", self.document(mirrored), self.document(real)))

    def test_goals_of_one_node(self):
        rows = [row("gemm_rs", 2048, 1.0, 0.9, 0.5), row("gemm_rs", 8192, 1.0, 1.2, 0.8), row("gemm_rs", 16384, 1.0, 1.5, 0.91)]
        found = {what: (value, holds) for _, what, value, holds in operator_tables.goals(rows)}
        mean, worst, share = found.values()
        self.assertAlmostEqual(mean[0], (1.2 * 1.5) ** 0.5)
        self.assertEqual((mean[1], worst, share), (True, (0.9, False), (0.91, True)))

    def test_goals_over_nodes_take_the_shard_in_place(self):
        shard = {"in_place_us": {"median": 1.0}, "speedup_in_place": 2.0}
        found = operator_tables.goals([row("ag_gemm", 16384, 2.0, 2.0, 0.45, nodes=2, **shard)])
        self.assertEqual([(value, holds) for _, _, value, holds in found], [(2.0, True), (2.0, True), (0.9, True)])


if __name__ == "__main__":
    unittest.main()
