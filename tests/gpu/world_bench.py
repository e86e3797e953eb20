"""What ring_bench.py and moe_bench.py have in common: options, and the loop over cases, whose rows go into one JSON file."""
import contextlib
import gc
import json
import os
import sys

import torch


def add_options(parser, sets, *, up_to, streams):
    """`up_to` and `streams`: what --up-to counts, and what --streams gives warpgroups for."""
    parser.add_argument("--library", required=True)
    parser.add_argument("--nodes", type=int, default=1, choices=[1, 2])
    parser.add_argument("--locals", type=int, default=2)
    parser.add_argument("--link-bandwidth", default="50GB/s")
    parser.add_argument("--set", action="append", default=[], choices=sets)
    parser.add_argument("--only", default="", help="cases whose text contains this")
    parser.add_argument("--up-to", type=int, default=1 << 30, help=up_to)
    parser.add_argument("--streams", default="0", help=f"warpgroups that {streams}; 0: the operator's own choice; it comes first")
    parser.add_argument("--seconds", type=float, default=0.8, help="of turns, a case")
    parser.add_argument("--json")


def streams_of(arguments):
    return [int(one) for one in arguments.streams.split(",")]


def link_bytes_per_us(arguments):
    return float(arguments.link_bandwidth.removesuffix("GB/s")) * 1e3


def run(arguments, cases, *, measure, right, text_of, machine):
    """Measures the cases that `arguments` ask for, and ends the process: 1 if a result was wrong or a case was cut short.

    `measure(case, kept)`: what it makes outside PyTorch it hands to `kept`, an ExitStack, at once. That ends with the case, however
    far this came, and before the next one takes memory."""
    rows, wrong, cut_short = [], 0, 0
    for case in cases:
        if arguments.only not in str(case):
            continue
        try:
            with contextlib.ExitStack() as kept:
                row = measure(case, kept)
        except Exception as error:  # noqa: BLE001 - the other cases go on
            print(f"{case}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            cut_short += 1
            continue
        finally:
            gc.collect()  # sides and what they belong to refer to each other
            torch.cuda.empty_cache()
        wrong += not right(row)
        rows.append(row)
        print(text_of(row), flush=True)
        if arguments.json:
            document = dict(command=" ".join(sys.argv), machine=machine(), nodes=arguments.nodes, locals=arguments.locals,
                            network=f"paced loopback, {arguments.link_bandwidth} a rail" if arguments.nodes > 1 else "none", cases=rows)
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
                file.write("\n")
    print(f"{len(rows)} cases, {wrong} wrong, {cut_short} cut short")
    # Daemons of this process, and streams of a library: their ends are the process's.
    sys.stdout.flush()
    os._exit(1 if wrong or cut_short else 0)
