"""Tables for users from JSON of tests/gpu/operators_bench and mirror_bench.

    python3 operator_tables.py FILE...            gain over the unfused form, share of the bound: an operator a row, M a column
    python3 operator_tables.py --times FILE...    a row for each shape, times in microseconds
    python3 operator_tables.py --alone FILE...    a row for each shape that was measured alone, too: each side at its own clock
    python3 operator_tables.py --goals FILE...    what we want of eight GPUs of a host, and whether it holds
    python3 operator_tables.py --mirrored FILE REAL   mirror_bench's rank 0 of so many, beside what operators_bench measured of as many
                                                  GPUs at some time: a row for each shape
    python3 operator_tables.py --mirrored-gains FILE REAL, --mirrored-goals FILE REAL   the first table, and what we want, with the
                                                  unfused form of REAL
"""
import json
import sys

from figures import geometric_mean

NAMES = {"ag_gemm": "AllGather+GEMM", "gemm_rs": "GEMM+ReduceScatter", "gemm_ar": "GEMM+AllReduce"}


def median(row, what):
    return row[what]["median"]


def bound_share(row):
    return row.get("of_max_products_collective", row.get("of_max_products_nvlink_network"))


def in_place_share(row):
    return bound_share(row) * median(row, "fused_us") / median(row, "in_place_us")


def series_of(row):
    """Which series of shapes a row belongs to: a layer's of fixed width, or that in which all grows with M."""
    m, n, k = row["m"], row["n_per_rank"], row["k_per_rank"]
    if (n, k) == ((7168, 8192) if row["op"] == "ag_gemm" else (8192, 3584)):
        return "wide"
    if (n, k) == ((m // 8, m) if row["op"] == "ag_gemm" else (m, m // 8)):
        return "narrow"
    sys.exit(f"{row['op']} {m} x {n} x {k} is of no series: --times has any shape")


def shape_text(row, series):
    if series == "wide":
        return f", N {row['n_per_rank']} per rank, K {row['k_per_rank']}" if row["op"] == "ag_gemm" else (
            f", N {row['n_per_rank']}, K {row['k_per_rank']} per rank")
    return ", K = M, N = M/8 per rank" if row["op"] == "ag_gemm" else ", N = M, K = M/8 per rank"


def print_table(header, rows):
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def cell(gain, share):
    return f"{gain:.2f}× ({100 * share:.0f}%)"


def print_gains(rows):
    heights = sorted({row["m"] for row in rows})
    table = []
    for series in ("wide", "narrow"):
        for op in NAMES:
            of_op = {row["m"]: row for row in rows if row["op"] == op and series_of(row) == series}
            if not of_op:
                continue
            first = next(iter(of_op.values()))
            forms = [(NAMES[op] + shape_text(first, series), "speedup", bound_share)]
            if "speedup_in_place" in first:
                forms.append(("the same, the shard in place (`input()`)", "speedup_in_place", in_place_share))
            for text, gain, share in forms:
                table.append([text, *(cell(of_op[m][gain], share(of_op[m])) if m in of_op else "" for m in heights)])
    print_table(["M", *map(str, heights)], table)


def print_times(rows):
    several = rows[0]["nodes"] > 1
    for op in NAMES:
        of_op = [row for row in rows if row["op"] == op]
        if not of_op:
            continue
        in_place = any("in_place_us" in row for row in of_op)
        header = ["M x N x K per rank", "fused us", "cuBLAS, then " + ("collective" if several else "NCCL"), "cuBLAS",
                  "collective" if several else "NCCL", "own unfused", *(["network at the rails' pace"] if several else []),
                  "speedup", "bound / fused", *(["in place us", "speedup"] if in_place else [])]
        table = []
        for row in of_op:
            times = [median(row, f"{what}_us") for what in ("fused", "baseline", "products", "collective", "unfused")]
            cells = [f"{row['m']} x {row['n_per_rank']} x {row['k_per_rank']}", *(f"{t:.0f}" for t in times)]
            if several:
                cells.append(f"{row['network_us']:.0f}")
            cells += [f"{row['speedup']:.2f}", f"{bound_share(row):.2f}"]
            if in_place:
                cells += [f"{median(row, 'in_place_us'):.0f}", f"{row['speedup_in_place']:.2f}"]
            table.append(cells)
        print(NAMES[op] + "\n")
        print_table(header, table)


def print_alone(rows):
    table = []
    for row in (row for op in NAMES for row in rows if row["op"] == op and "alone" in row):
        alone = row["alone"]
        table.append([f"{NAMES[row['op']]} {row['m']} x {row['n_per_rank']} x {row['k_per_rank']}",
                      f"{median(row, 'fused_us'):.0f}", f"{row['speedup']:.2f}",
                      *(f"{median(alone, f'{what}_us'):.0f}" for what in ("fused", "products", "baseline")),
                      f"{alone['speedup']:.2f}"])
    if not table:
        sys.exit("no row was measured alone")
    print_table(["M x N x K per rank", "interleaved: fused µs", "speedup", "alone: fused µs", "cuBLAS", "cuBLAS, then NCCL", "speedup"],
                table)


def counterparts(rows, real):
    """Of each mirrored row that of as many ranks, with a baseline, by other kernels and perhaps on other GPUs."""
    def key(row):
        return row["op"], row["nodes"], row["ranks"], row["m"], row["n_per_rank"], row["k_per_rank"]

    measured = {key(row): row for row in real if "speedup" in row}
    for row in rows:
        if key(row) not in measured:
            sys.exit(f"{row['op']} {row['m']} x {row['n_per_rank']} x {row['k_per_rank']} of {row['ranks']} ranks was not measured without a mirror")
    return [measured[key(row)] for row in rows]


def with_gains(rows, real):
    """The mirrored rows with the gain over the unfused form of their counterparts."""
    for row, there in zip(rows, counterparts(rows, real)):
        row["speedup"] = median(there, "baseline_us") / median(row, "fused_us")
        if "in_place_us" in row:
            row["speedup_in_place"] = median(there, "baseline_us") / median(row, "in_place_us")
    return rows


def print_mirrored(rows, real):
    pairs = list(zip(rows, counterparts(rows, real)))
    for op in NAMES:
        of_op = [(row, there) for row, there in pairs if row["op"] == op]
        if not of_op:
            continue
        in_place = any("in_place_us" in row for row, _ in of_op)
        header = ["M x N x K per rank", "mirrored: fused us", *(["in place us"] if in_place else []), "cuBLAS", "bound / fused",
                  "as many GPUs: fused us", "unfused there", "that / mirrored", *(["that / in place"] if in_place else [])]
        table = []
        for row, there in of_op:
            times = [median(row, what) for what in ("fused_us", *(["in_place_us"] if in_place else []))]
            unfused = median(there, "baseline_us")
            table.append([f"{row['m']} x {row['n_per_rank']} x {row['k_per_rank']}", *(f"{t:.0f}" for t in times),
                          f"{median(row, 'products_us'):.0f}", f"{row['of_max_products_nvlink_network']:.2f}",
                          f"{median(there, 'fused_us'):.0f}", f"{unfused:.0f}", *(f"{unfused / t:.2f}" for t in times)])
        print(NAMES[op] + "\n")
        print_table(header, table)


def goals(rows):
    """(operator, what is wanted, what was reached, whether that holds) of rows of one world."""
    several = rows[0]["nodes"] > 1
    found = []
    for op in NAMES:
        of_op = [row for row in rows if row["op"] == op]
        if not of_op:
            continue
        # Over nodes a gather's baseline has its shard in memory the daemons know: so must we.
        gains = {(series_of(row), row["m"]): row.get("speedup_in_place", row["speedup"]) for row in of_op}
        shares = {(series_of(row), row["m"]): in_place_share(row) if "in_place_us" in row else bound_share(row)
                  for row in of_op}

        def add(what, value, least, op=op):
            found.append((op, what, value, value >= least))

        if several:
            best = {"ag_gemm": 1.41, "gemm_rs": 1.40, "gemm_ar": 1.72}[op]
            add(f"gain at the best shape, {best:.2f} at least", max(gains.values()), best)
        else:
            best = 1.3 if op == "gemm_ar" else 1.2
            large = [gain for (_, m), gain in gains.items() if m >= 8192]
            if large:
                add(f"gain, mean of M >= 8192, {best:.1f} at least", geometric_mean(large), best)
        add("gain at the worst shape, 1.00 at least", min(gains.values()), 1.0)
        huge = [share for (_, m), share in shares.items() if m >= 16384]
        if huge and (several or op != "gemm_ar"):
            least = 0.88 if several else 0.90
            add(f"share of the bound, worst of M >= 16384, {least:.2f} at least", min(huge), least)
    return found


def print_goals(rows):
    print_table(["operator", "goal", "reached", "holds"],
                [[NAMES[op], what, f"{value:.2f}", "yes" if holds else "no"] for op, what, value, holds in goals(rows)])


def read(name):
    with open(name, encoding="utf-8") as file:
        return json.load(file)


def main(arguments):
    mirrored = {"--mirrored": print_mirrored, "--mirrored-gains": lambda *rows: print_gains(with_gains(*rows)),
                "--mirrored-goals": lambda *rows: print_goals(with_gains(*rows))}.get(arguments[0] if arguments else "")
    if mirrored and len(arguments) == 3:
        document = read(arguments[1])
        print(f"{document['gpu']}, {document['devices']} of them: {document['ranks']}; network: {document['network']}\n")
        return mirrored(document["rows"], read(arguments[2])["rows"])
    printer = {"--times": print_times, "--alone": print_alone, "--goals": print_goals}.get(arguments[0] if arguments else "")
    files = arguments[1:] if printer else arguments
    printer = printer or print_gains
    if not files:
        sys.exit(__doc__)
    for name in files:
        document = read(name)
        rows = [row for row in document["rows"] if "speedup" in row]
        if not rows:
            sys.exit(f"{name}: no row has a baseline")
        print(f"{document['gpu']}, {document['devices']} of them; network: {document['network']}\n")
        printer(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
