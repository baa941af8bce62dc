"""The experiment from the host: its state, and the launches over it or over the heap."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import devalloc
from benchmarks.lines.audit import audit
from benchmarks.lines.geometry import Geometry, initialise
from benchmarks.lines.heap import free, malloc
from benchmarks.lines.search import take_what_rests
from benchmarks.lines.state import State, Stats
from benchmarks.lines.upkeep import trim_kernel, usable_size_kernel
from devalloc import kernels as da
from devalloc.heap.state import Snapshot
from devalloc.sizes import PAGE_BYTES

NOWHERE = 1 << 40
"""The address of page 0 where no memory is behind the pages: nothing reads or writes it."""


@triton.jit
def allocate(heap, nbytes, active, LINES: tl.constexpr):
    """malloc of the experiment, or of the heap."""
    if LINES:
        addr = malloc(heap, nbytes, active)
    else:
        addr = da.malloc(heap, nbytes, mask=active)
    return addr


@triton.jit
def release(heap, addr, active, LINES: tl.constexpr):
    """free of the experiment, or of the heap."""
    if LINES:
        free(heap, addr, active)
    else:
        da.free(heap, addr, mask=active)


@triton.jit(do_not_specialize=["n"])
def malloc_kernel(heap, sizes, out, n, LINES: tl.constexpr, LANES: tl.constexpr):
    """Allocate a slot for each element of ``out`` that is 0."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = (lane < n) & (tl.load(out + lane, mask=lane < n, other=1) == 0)
    addr = allocate(heap, tl.load(sizes + lane, mask=active, other=0), active, LINES)
    tl.store(out + lane, addr, mask=active)


@triton.jit(do_not_specialize=["n"])
def free_kernel(heap, addrs, chosen, n, LINES: tl.constexpr, LANES: tl.constexpr):
    """Free the chosen addresses, and make them 0."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = (lane < n) & (tl.load(chosen + lane, mask=lane < n, other=0) != 0)
    release(heap, tl.load(addrs + lane, mask=active, other=0), active, LINES)
    tl.store(addrs + lane, tl.zeros((LANES,), tl.int64), mask=active)


@triton.jit(do_not_specialize=["size"])
def malloc_scalar_kernel(heap, out, size, LINES: tl.constexpr):
    tl.store(out + tl.program_id(0), allocate(heap, size.to(tl.int64), size > 0, LINES))


@triton.jit
def free_scalar_kernel(heap, addrs, LINES: tl.constexpr):
    addr = tl.load(addrs + tl.program_id(0))
    release(heap, addr, addr != 0, LINES)


@triton.jit(do_not_specialize=["n", "size"])
def pairs_kernel(heap, n, size, LINES: tl.constexpr):
    """``latency``: n mallocs and frees of one program, one after the other."""
    done = n * 0
    while done < n:
        addr = allocate(heap, size.to(tl.int64), size > 0, LINES)
        release(heap, addr, size > 0, LINES)
        done += 1


@triton.jit(do_not_specialize=["n", "size", "rounds"])
def churn_kernel(heap, wrong, n, size, rounds, LINES: tl.constexpr, LANES: tl.constexpr):
    """``churn``: every lane mallocs, writes a word, reads it and frees. Counts what was wrong."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = lane < n
    bad = tl.zeros((LANES,), tl.int32)
    done = n * 0
    while done < rounds:
        addr = allocate(heap, (lane & 0) + size, active, LINES)
        got = active & (addr != 0)
        ptr = addr.to(tl.pointer_type(tl.int64))
        tl.store(ptr, lane, mask=got)
        bad += (active & (tl.load(ptr, mask=got, other=-1) != lane)).to(tl.int32)
        release(heap, addr, got, LINES)
        done += 1
    tl.atomic_add(wrong, tl.sum(bad, axis=0))


@triton.jit
def rest_kernel(heap, rested):
    tl.store(rested, take_what_rests(heap).to(tl.int64))


class Raced:
    """What is raced: a handle, and the launches over it. One warp, but for scalars."""

    name = "devalloc"
    handle: torch.Tensor

    def malloc(self, sizes: torch.Tensor, out: torch.Tensor, lanes: int) -> None:
        grid = (triton.cdiv(out.numel(), lanes),)
        args = (self.handle, sizes, out, out.numel())
        malloc_kernel[grid](*args, LINES=self.ours, LANES=lanes, num_warps=1)

    def free(self, addrs: torch.Tensor, chosen: torch.Tensor, lanes: int) -> None:
        grid = (triton.cdiv(addrs.numel(), lanes),)
        args = (self.handle, addrs, chosen, addrs.numel())
        free_kernel[grid](*args, LINES=self.ours, LANES=lanes, num_warps=1)

    def malloc_scalars(self, out: torch.Tensor, size: int, warps: int) -> None:
        malloc_scalar_kernel[(out.numel(),)](
            self.handle, out, size, LINES=self.ours, num_warps=warps
        )

    def free_scalars(self, addrs: torch.Tensor, warps: int) -> None:
        free_scalar_kernel[(addrs.numel(),)](self.handle, addrs, LINES=self.ours, num_warps=warps)

    def pairs(self, count: int, size: int) -> None:
        pairs_kernel[(1,)](self.handle, count, size, LINES=self.ours, num_warps=1)

    def churn(self, wrong: torch.Tensor, n: int, size: int, rounds: int, lanes: int) -> None:
        grid = (triton.cdiv(n, lanes),)
        args = (self.handle, wrong, n, size, rounds)
        churn_kernel[grid](*args, LINES=self.ours, LANES=lanes, num_warps=1)

    @property
    def ours(self) -> bool:
        return self.name == "lines"


class Today(Raced):
    """The heap."""

    def __init__(self, nbytes: int) -> None:
        self.heap = devalloc.Heap(nbytes)
        self.handle = self.heap.handle


class Lines(Raced):
    """A heap of the experiment.

    Parameters
    ----------
    nbytes : int
        Bytes, a multiple of the page.
    device : str
        "cuda", or "cpu" in the interpreter.
    memory : bool
        Whether there is memory behind the pages; if not, addresses are only numbers.
    stripes, ring, magazines : int
        Lines per class, places of a ring, and magazines; powers of two. Default: what suits the
        size.
    """

    name = "lines"

    def __init__(
        self,
        nbytes: int,
        device: str = "cuda",
        memory: bool = False,
        stripes: int | None = None,
        ring: int | None = None,
        magazines: int | None = None,
    ) -> None:
        self.geometry = Geometry.of(nbytes // PAGE_BYTES, stripes, ring, magazines)
        self.pages = self.geometry.pages
        self.base = NOWHERE
        if memory:
            self.data = torch.zeros(nbytes + PAGE_BYTES, dtype=torch.uint8, device=device)
            self.base = -(-self.data.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        self.handle = torch.empty(self.geometry.words, dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        """Make it a new heap: nothing lives, and nothing was counted."""
        initialise(self.handle, self.geometry, self.base)

    def rest(self) -> int:
        """Take what rests: spans out of magazines, and empty pages that are kept."""
        rested = torch.zeros(1, dtype=torch.int64, device=self.handle.device)
        rest_kernel[(1,)](self.handle, rested)
        return int(rested)

    def trim(self) -> None:
        """The same by many programs. One launch; does not synchronise."""
        trim_kernel[(self.geometry.chunks,)](self.handle, num_warps=1)

    def usable_size(self, addrs: torch.Tensor) -> torch.Tensor:
        """Usable bytes of each block, 0 where none lives."""
        sizes = torch.empty_like(addrs)
        grid = (triton.cdiv(addrs.numel(), 128),)
        usable_size_kernel[grid](self.handle, addrs, sizes, addrs.numel(), BLOCK=128, num_warps=1)
        return sizes

    def state(self) -> State:
        """What the heap holds, at rest."""
        if self.handle.is_cuda:
            torch.cuda.synchronize(self.handle.device)
        return State(self.handle, self.geometry)

    def stats(self) -> Stats:
        """How full the heap is. Trims first."""
        self.trim()
        return self.state().stats()

    def snapshot(self) -> Snapshot:
        """All pages at this moment. Trims first."""
        self.trim()
        return self.state().snapshot(str(self.handle.device))

    def audit(self) -> None:
        """Check H1 to H4, before and after a trim; raises CorruptionError."""
        audit(self.state())
        self.trim()
        audit(self.state())

    def errors(self) -> dict[str, int]:
        """How many errors of each kind there were."""
        kinds = ("double free", "invalid free", "out of memory", "invalid argument")
        return dict(zip(kinds, self.handle[32:36].tolist(), strict=True))

    def free_pages(self) -> list[int]:
        """The numbers of the free pages."""
        first = self.geometry.rows
        words = self.handle[first : first + self.geometry.chunks].tolist()
        bits = range(64)
        return [64 * at + bit for at, word in enumerate(words) for bit in bits if word >> bit & 1]

    def largest_free(self) -> int:
        """The longest run of free pages."""
        longest = length = 0
        before = -2
        for page in self.free_pages():
            length = length + 1 if page == before + 1 else 1
            longest = max(longest, length)
            before = page
        return longest
