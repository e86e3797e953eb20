#!/usr/bin/env python3
"""check_train_step.py <mkerneld> <train_step>: the training step in C++ learns, and all ranks of two nodes see the same losses."""
import re
import sys

from cluster import Cluster

with Cluster(sys.argv[1]) as nodes:
    ranks = [nodes.rank([sys.argv[2]], "training", rank) for rank in range(4)]
    curves = []
    for rank, process in enumerate(ranks):
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 0, said
        curves.append(re.findall(rf"^rank {rank}: step \d+: loss (\S+)$", said, re.M))
assert len(curves[0]) == 5 and all(curve == curves[0] for curve in curves), curves
losses = list(map(float, curves[0]))
assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 20, losses
print("losses:", *curves[0])
