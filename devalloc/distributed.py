"""Regions that sleep and wake on all ranks of a process group, or on none.

Every rank does all that can fail, and then tells the others whether it succeeded. Only if all did
does each take the last step, which cannot fail; otherwise each undoes what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from devalloc.errors import DevallocError, InvalidArgument

if TYPE_CHECKING:
    from devalloc.arena import Arena


def pause(
    arena: Arena,
    tag: str | Sequence[str] | None = None,
    group: Any = None,
    *,
    streams: Sequence[int] | None = None,
) -> None:
    """`Arena.pause` on every rank of a group, each with its own arena; all ranks or none.

    Every rank of the group must call it. Tags may differ, and so may what sleeps already.

    Parameters
    ----------
    arena, tag, streams
        As for `Arena.pause`.
    group : ProcessGroup, optional
        Default: all ranks. With the backend gloo nothing is needed of the GPUs.

    Raises
    ------
    DevallocError
        If another rank could not: the message has its rank and its error. If this rank could not,
        its own error is raised. Nothing has changed then, on no rank.
    InvalidArgument
        If there is no such group, or this rank is not in it.
    """
    vote = _Vote(group)
    try:
        arena._require_open()
        arena._regions.pause(tag, streams, vote.agree)
    except BaseException as error:
        vote.refuse(error)
        raise


def resume(arena: Arena, tag: str | Sequence[str] | None = None, group: Any = None) -> None:
    """`Arena.resume` on every rank of a group; all ranks or none, as `pause`."""
    vote = _Vote(group)
    try:
        arena._regions.resume(tag, vote.agree)
    except BaseException as error:
        vote.refuse(error)
        raise


class _Vote:
    """One exchange of answers between the ranks."""

    def __init__(self, group: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument(
                "there is no process group; call torch.distributed.init_process_group first"
            )
        if dist.get_rank(group) < 0:
            raise InvalidArgument("this rank is not in the group; call with a group that it is in")
        self._group = group
        self._done = False

    def agree(self) -> None:
        """This rank can; DevallocError if another cannot."""
        refused = [
            f"rank {rank}: {answer}" for rank, answer in enumerate(self._exchange("")) if answer
        ]
        if refused:
            raise DevallocError(f"nothing has changed on any rank, because of {'; '.join(refused)}")

    def refuse(self, error: BaseException) -> None:
        """This rank cannot, unless it has answered already."""
        if not self._done:
            self._exchange(f"{type(error).__name__}: {error}")

    def _exchange(self, answer: str) -> list[str]:
        self._done = True
        answers: list[Any] = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(answers, answer, group=self._group)
        return answers
