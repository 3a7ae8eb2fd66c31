"""From what the user gives as `group` to the group the engine talks through."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from stretto.errors import InputError
from stretto.runtime.wire.inprocess import InProcessGroup
from stretto.runtime.wire.local import LocalGroup
from stretto.runtime.wire.peers import TRANSPORTS, PeerGroup
from stretto.runtime.wire.transport import Group


@dataclass(frozen=True, slots=True)
class GroupOver:
    """A process group, and what is to carry its messages unless the engine is told otherwise.

    Args:
        process_group: The ranks.
        transport: `auto`, `sockets` or `gloo`.
    """

    process_group: dist.ProcessGroup
    transport: str


def resolve_group(group: object, *, transport: str, on_cpu: bool, timeout_s: float) -> Group:
    """A group to talk through.

    Args:
        group: None (one rank alone), a `torch.distributed` process group, a one-dimensional
            `DeviceMesh`, or a group of an `InProcessHub`.
        transport: `auto`, `sockets` or `gloo`.
        on_cpu: Whether this rank's stages are on the CPU.
        timeout_s: How long ranks wait for each other.

    Raises:
        InputError: it is none of these, or this process is not a member.
    """
    if transport not in TRANSPORTS:
        raise InputError(f"transport is {transport!r}; it must be one of {', '.join(TRANSPORTS)}")
    if isinstance(group, GroupOver):
        transport = group.transport if transport == "auto" else transport
        group = group.process_group
    get_group = getattr(group, "get_group", None)
    if get_group is not None and getattr(group, "ndim", None) == 1:
        group = get_group()
    if isinstance(group, dist.ProcessGroup):
        return PeerGroup(group, transport=transport, on_cpu=on_cpu, timeout_s=timeout_s)
    if transport != "auto" and (group is None or isinstance(group, InProcessGroup)):
        raise InputError(
            f"transport is {transport!r}, which is for ranks that are processes; threads and a "
            "single rank have no choice: leave it at 'auto'"
        )
    if group is None:
        return LocalGroup()
    if isinstance(group, InProcessGroup):
        return group.join()
    raise InputError(
        f"group is a {type(group).__qualname__}; it must be a torch.distributed process group, a "
        "one-dimensional DeviceMesh (mesh['pp']), an in-process group, or None for one rank"
    )
