"""Heaps with no memory behind them: addresses are only numbers, which no test reads or writes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from devalloc import kernels as da
from devalloc.heap.geometry import Geometry, initialise
from devalloc.heap.heap_audit import audit
from devalloc.heap.state import Snapshot, State, Stats
from devalloc.kernels.search import take_what_rests
from devalloc.kernels.upkeep import rest_kernel, usable_size_kernel

NOWHERE = 1 << 40
"""The address of page 0."""


@triton.jit(do_not_specialize=["n"])
def malloc_kernel(heap, sizes, out, n, LANES: tl.constexpr):
    """Allocate a block for each element of ``out`` that is 0."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = (lane < n) & (tl.load(out + lane, mask=lane < n, other=1) == 0)
    addr = da.malloc(heap, tl.load(sizes + lane, mask=active, other=0), mask=active)
    tl.store(out + lane, addr, mask=active)


@triton.jit(do_not_specialize=["n"])
def free_kernel(heap, addrs, chosen, n, LANES: tl.constexpr):
    """Free the chosen addresses, and make them 0."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = (lane < n) & (tl.load(chosen + lane, mask=lane < n, other=0) != 0)
    da.free(heap, tl.load(addrs + lane, mask=active, other=0), mask=active)
    tl.store(addrs + lane, tl.zeros((LANES,), tl.int64), mask=active)


@triton.jit(do_not_specialize=["size"])
def malloc_scalar_kernel(heap, out, size):
    tl.store(out + tl.program_id(0), da.malloc(heap, size))


@triton.jit
def free_scalar_kernel(heap, addrs):
    da.free(heap, tl.load(addrs + tl.program_id(0)))


@triton.jit(do_not_specialize=["n", "size"])
def pairs_kernel(heap, n, size):
    """n mallocs and frees of one program, one after the other."""
    done = n * 0
    while done < n:
        da.free(heap, da.malloc(heap, size))
        done += 1


@triton.jit
def search_rest_kernel(heap, rested):
    tl.store(rested, take_what_rests(heap).to(tl.int64))


class BareHeap:
    """The state of a heap, and launches over it; ``lanes`` is the width of a program.

    Parameters
    ----------
    pages : int
    stripes, ring, magazines : int
        Lines per class, places of a ring, and magazines; powers of two. Default: what suits the
        size.
    """

    def __init__(
        self,
        pages: int,
        stripes: int | None = None,
        ring: int | None = None,
        magazines: int | None = None,
    ) -> None:
        self.geometry = Geometry.of(pages, stripes, ring, magazines)
        self.pages = pages
        self.base = NOWHERE
        self.handle = torch.empty(self.geometry.words, dtype=torch.int64)
        self.reset()

    def reset(self) -> None:
        initialise(self.handle, self.geometry, self.base)

    def copy(self) -> BareHeap:
        other = BareHeap(self.pages)
        other.geometry = self.geometry
        other.handle = self.handle.clone()
        return other

    def malloc(self, sizes: torch.Tensor | list[int], lanes: int = 64) -> torch.Tensor:
        """A block for each size; 0 where there is none."""
        sizes = torch.as_tensor(sizes)
        out = torch.zeros_like(sizes)
        self.refill(sizes, out, lanes)
        return out

    def refill(self, sizes: torch.Tensor, out: torch.Tensor, lanes: int) -> None:
        """Allocate a block for each element of ``out`` that is 0."""
        n = out.numel()
        malloc_kernel[(triton.cdiv(n, lanes),)](self.handle, sizes, out, n, LANES=lanes)

    def free(self, addrs: torch.Tensor, lanes: int = 64) -> None:
        self.free_some(addrs.clone(), torch.ones(addrs.numel(), dtype=torch.int32), lanes)

    def free_some(self, addrs: torch.Tensor, chosen: torch.Tensor, lanes: int) -> None:
        """Free the chosen addresses, and make them 0."""
        n = addrs.numel()
        free_kernel[(triton.cdiv(n, lanes),)](self.handle, addrs, chosen, n, LANES=lanes)

    def malloc_scalars(self, count: int, size: int) -> torch.Tensor:
        """A block for each of ``count`` programs."""
        out = torch.zeros(count, dtype=torch.int64)
        malloc_scalar_kernel[(count,)](self.handle, out, size)
        return out

    def free_scalars(self, addrs: torch.Tensor) -> None:
        free_scalar_kernel[(addrs.numel(),)](self.handle, addrs)

    def rest(self) -> int:
        """Take what rests, as a search does: spans out of magazines, and empty pages."""
        rested = torch.zeros(1, dtype=torch.int64)
        search_rest_kernel[(1,)](self.handle, rested)
        return int(rested)

    def trim(self) -> None:
        """The same by many programs."""
        for _ in range(2):
            rest_kernel[(self.geometry.chunks,)](self.handle)

    def usable_size(self, addrs: torch.Tensor) -> torch.Tensor:
        sizes = torch.empty_like(addrs)
        grid = (triton.cdiv(addrs.numel(), 128),)
        usable_size_kernel[grid](self.handle, addrs, sizes, addrs.numel(), BLOCK=128)
        return sizes

    def state(self) -> State:
        return State(self.handle, self.geometry)

    def stats(self) -> Stats:
        self.trim()
        return self.state().stats()

    def snapshot(self) -> Snapshot:
        self.trim()
        return self.state().snapshot("cpu")

    def audit(self) -> None:
        """Check H1 to H4, before and after a trim."""
        audit(self.state())
        self.trim()
        audit(self.state())

    def errors(self) -> dict[str, int]:
        """How many errors of each kind there were."""
        kinds = ("double free", "invalid free", "out of memory", "invalid argument")
        return dict(zip(kinds, self.handle[32:36].tolist(), strict=True))

    def free_pages(self) -> list[int]:
        """The numbers of the free pages."""
        return self.state().page_free.nonzero()[0].tolist()

    def largest_free(self) -> int:
        """The longest run of free pages."""
        longest = length = 0
        before = -2
        for page in self.free_pages():
            length = length + 1 if page == before + 1 else 1
            longest = max(longest, length)
            before = page
        return longest
