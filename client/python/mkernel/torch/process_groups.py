"""From torch.distributed's groups to the ranks of the launch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import invalid


def ranks_of(group: Any) -> tuple[Any, list[int]]:
    """(ProcessGroup, the ranks of the launch) of a ProcessGroup or a DeviceMesh of one dimension."""
    if hasattr(group, "mesh_dim_names"):  # a DeviceMesh
        if group.ndim != 1:
            names = group.mesh_dim_names or range(group.ndim)
            raise invalid(f"the DeviceMesh has the dimensions {', '.join(map(str, names))}: give one of them, as mesh['tp']")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise invalid(f"init takes a ProcessGroup, a DeviceMesh of one dimension, or a list of ranks, not a {type(group).__name__}")
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        raise invalid(f"the ProcessGroup has its ranks in the order {ranks}: mkernel needs them rising")
    return group, list(ranks)


def is_of(group: Any, process_group: Any) -> bool:
    """Whether a `Group` has the ranks of a ProcessGroup. Equal meshes may have ProcessGroups of their own, and a Group may have none."""
    if group.process_group is process_group:
        return True
    return group.ranks is not None and list(group.ranks) == dist.get_process_group_ranks(process_group)
