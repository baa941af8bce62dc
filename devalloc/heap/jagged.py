"""`Heap.gather` and `Heap.scatter`: what they are given, made definite, and their launches."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from devalloc.common.arguments import require_dtype
from devalloc.errors import InvalidArgument
from devalloc.heap import gather_scatter
from devalloc.heap.devices import INTERPRETED, on_device
from devalloc.sizes import quote

# Units (of at most 8 bytes) of a program, and of a step of it, which keeps enough loads on their
# way; rows that it looks at together. The interpreter takes as long for many elements as for few.
SPAN = 1 << 16 if INTERPRETED else 4096
ITEMS = 1 << 13 if INTERPRETED else 1024
LANES = 4096 if INTERPRETED else 128
WARPS = 4

_UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class JaggedMethods:
    """The part of `devalloc.Heap` that copies rows between blocks and a tensor."""

    device: torch.device
    _argument: torch.Tensor

    def _requests(self, values: torch.Tensor | Sequence[int] | int, name: str) -> torch.Tensor:
        raise NotImplementedError

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def gather(
        self,
        addrs: torch.Tensor | Sequence[int],
        lengths: torch.Tensor | Sequence[int],
        dtype: torch.dtype,
        total: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy many blocks into one tensor, end to end: rows of any lengths, as in torch.nested.

        Parameters
        ----------
        addrs : int64 tensor on the heap's device, any shape, or a sequence of ints
            The blocks, as malloc returned them.
        lengths : tensor of integers of the shape of ``addrs``, or a sequence of ints
            How many elements of each block to copy, from its start. Where it is 0 the address may
            be anything. On the CPU, or on the heap's device.
        dtype : torch.dtype
            What the blocks hold.
        total : int, optional
            How many elements ``values`` has; the sum of the lengths, or more, and then the rest is
            undefined. Needed only to avoid waiting.

        Returns
        -------
        values : tensor of ``dtype``, shape (total,)
        offsets : int64 tensor, shape (n + 1,)
            Row i is ``values[offsets[i] : offsets[i + 1]]``, and
            ``torch.nested.nested_tensor_from_jagged(values, offsets)`` has these rows.

        Raises
        ------
        InvalidArgument
            For other arguments, and, if the lengths are on the CPU, if one is negative or ``total``
            is less than their sum.

        Notes
        -----
        One launch on the current stream, after a prefix sum. If the lengths are on the CPU, or with
        ``total``, the call does not wait; otherwise the call waits for the lengths. Recorded (see
        `check`) are as InvalidPointer blocks that are not live or smaller than their row, which
        becomes zeros; and as InvalidArgument, for lengths on a device, negative ones (``values`` is
        undefined then), and a ``total`` that is too small (what has no room is left out).
        """
        known = known_total(total)
        require_dtype(dtype)
        addrs = self._requests(addrs, "addrs")
        counts = lengths_of(lengths, addrs.shape, self.device)
        if counts.device.type == "cpu":
            offsets = offsets_on_host(counts)
            known = total_of(known, int(offsets[-1]))
            offsets = self._upload(offsets)
        else:
            offsets = offsets_of(counts)
            if known is None:
                known = max(0, int(offsets[-1]))
        values = torch.empty(known, dtype=dtype, device=self.device)
        self._move_rows(gather_scatter.gather_kernel, addrs, offsets, values)
        return values, offsets

    def scatter(
        self,
        values: torch.Tensor,
        offsets: torch.Tensor,
        addrs: torch.Tensor | Sequence[int],
    ) -> None:
        """Copy rows of one tensor into blocks: the inverse of `gather`.

        Parameters
        ----------
        values : tensor on the heap's device, shape (total,)
        offsets : int64 tensor on the heap's device, shape (n + 1,)
            Row i is ``values[offsets[i] : offsets[i + 1]]``.
        addrs : int64 tensor on the heap's device, any shape, or a sequence of ints
            The n blocks, as malloc returned them; anything for rows without elements.

        Notes
        -----
        One launch on the current stream; waits for nothing. Rows whose blocks are not live or too
        small are left out, and recorded as in `gather`; so are offsets that do not grow, or end
        behind the values.
        """
        addrs = self._requests(addrs, "addrs")
        check_values(values, offsets, addrs.numel(), self.device)
        values = values.detach().resolve_conj().resolve_neg().contiguous()
        self._move_rows(gather_scatter.scatter_kernel, addrs, offsets.contiguous(), values)

    def _move_rows(
        self, kernel: object, addrs: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor
    ) -> None:
        if addrs.numel():
            units, each = as_units(values)
            with on_device(self.device):
                kernel[grid_of(units.numel())](  # type: ignore[index]
                    self._argument, addrs, offsets, units, addrs.numel(), values.numel(),
                    UNIT=each, SPAN=SPAN, LANES=LANES,
                    ITEMS=ITEMS, num_warps=WARPS,
                )  # fmt: skip


def as_units(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The same memory as integers, for whose type kernels are compiled, and how many of them an
    element has."""
    size = values.dtype.itemsize
    return values.view(_UNITS[size]), 2 if size == 16 else 1


def grid_of(units: int) -> tuple[int]:
    return (max(1, -(-units // SPAN)),)


def total_of(total: int | None, needed: int) -> int:
    """How many elements the values get, where it is known how many are needed."""
    if total is not None and total < needed:
        raise InvalidArgument(f"gather: the rows have {needed} elements, total is {total}")
    return needed if total is None else total


def known_total(total: object) -> int | None:
    """`total` as an int that is not negative, or None."""
    if total is None:
        return None
    try:
        number = operator.index(total)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise InvalidArgument(f"gather: total is a number of elements, not {quote(total)}")
    return number


def lengths_of(
    lengths: torch.Tensor | Sequence[int], rows: torch.Size, device: torch.device
) -> torch.Tensor:
    """Lengths as an int64 tensor with one axis, on the CPU or on the heap's device."""
    if not isinstance(lengths, torch.Tensor):
        try:
            lengths = torch.tensor(
                [operator.index(length) for length in lengths], dtype=torch.int64, device="cpu"
            )
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InvalidArgument(
                f"lengths must be integers, in a list or in a tensor: {error}"
            ) from error
        shaped = lengths.numel() == rows.numel()
    else:
        shaped = lengths.shape == rows
    if not shaped:
        raise InvalidArgument(
            f"one length for each address: addrs has the shape {tuple(rows)}, lengths "
            f"{tuple(lengths.shape)}"
        )
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise InvalidArgument(f"lengths must be integers, not {lengths.dtype}")
    if lengths.device not in (device, torch.device("cpu")):
        raise InvalidArgument(f"lengths must be on {device} or on the CPU, not on {lengths.device}")
    return lengths.flatten().to(torch.int64)


def offsets_on_host(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets of rows whose lengths are on the CPU."""
    if len(lengths) and int(lengths.min()) < 0:
        row = int((lengths < 0).nonzero()[0])
        raise InvalidArgument(f"row {row} has the length {int(lengths[row])}: none is negative")
    if (elements := float(lengths.sum(dtype=torch.float64))) > 1 << 60:
        raise InvalidArgument(f"the rows have {elements:.3g} elements: more than any memory has")
    return offsets_of(lengths)


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Where each row begins if they are laid end to end, and where the last one ends."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def check_values(
    values: torch.Tensor, offsets: torch.Tensor, rows: int, device: torch.device
) -> None:
    """Refuse what `Heap.scatter` cannot read."""
    for name, tensor in (("values", values), ("offsets", offsets)):
        if not isinstance(tensor, torch.Tensor) or tensor.device != device or tensor.dim() != 1:
            raise InvalidArgument(
                f"scatter: {name} is a tensor with one axis on {device}, not {_shown(tensor)}"
            )
    if offsets.dtype != torch.int64 or len(offsets) != rows + 1:
        raise InvalidArgument(
            f"scatter: offsets has int64 numbers, one more than the {rows} addresses, not "
            f"{_shown(offsets)}"
        )


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}, on {value.device}"
    return quote(value)
