"""From what the user gives as `group` to the group the engine talks through."""

from __future__ import annotations

import torch.distributed as dist

from stretto.errors import InputError
from stretto.runtime.wire.gloo import GlooGroup
from stretto.runtime.wire.inprocess import InProcessGroup
from stretto.runtime.wire.local import LocalGroup
from stretto.runtime.wire.transport import Group


def resolve_group(group: object, *, timeout_s: float) -> Group:
    """A group to talk through.

    Args:
        group: None (one rank alone), a `torch.distributed` process group, a one-dimensional
            `DeviceMesh`, or a group of an `InProcessHub`.
        timeout_s: How long ranks wait for each other.

    Raises:
        InputError: it is none of these, or this process is not a member.
    """
    if group is None:
        return LocalGroup()
    if isinstance(group, InProcessGroup | LocalGroup):
        return group
    if isinstance(group, dist.ProcessGroup):
        return GlooGroup(group, timeout_s=timeout_s)
    get_group = getattr(group, "get_group", None)
    if get_group is not None and getattr(group, "ndim", None) == 1:
        return GlooGroup(get_group(), timeout_s=timeout_s)
    raise InputError(
        f"group is a {type(group).__qualname__}; it must be a torch.distributed process group, a "
        "one-dimensional DeviceMesh (mesh['pp']), an in-process group, or None for one rank"
    )
