"""python -m mkernel --nodes 2 --local 2 script.py: runs a script on every rank of nodes on this machine."""

from __future__ import annotations

import argparse
import signal
import sys

from .errors import Error, RankFailed
from .local import local_cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mkernel", description="Runs a script on every rank of nodes on this machine.")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--local", type=int, default=2, help="ranks of each node")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    arguments = parser.parse_args()
    if not arguments.script:
        parser.error("which script?")
    # A launcher that is told to end ends its ranks and daemons on the way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda seen, _frame: sys.exit(128 + seen))
    try:
        with local_cluster(arguments.nodes, arguments.local) as cluster:
            cluster.run_script(arguments.script)
    except (Error, RankFailed) as error:
        print(f"mkernel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
