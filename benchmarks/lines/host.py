"""The experiment from the host: its state, and the launches over it or over the heap."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import devalloc
from benchmarks.lines import layout
from benchmarks.lines.heap import free, malloc
from devalloc import kernels as da
from devalloc.sizes import PAGE_BYTES

CLASSES = 38
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
        self.pages = pages = nbytes // PAGE_BYTES
        self.stripes = stripes = stripes or min(8, 1 << max(0, (pages // 1024).bit_length() - 1))
        ring = ring or min(1024, max(16, 1 << (pages // 64).bit_length()))
        base = NOWHERE
        if memory:
            self.data = torch.zeros(nbytes + PAGE_BYTES, dtype=torch.uint8, device=device)
            base = -(-self.data.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        chunks = -(-pages // 64)
        records = layout.LINES.value + CLASSES * stripes * layout.LINE_STRIDE.value
        self.words = records + pages * layout.RECORD_WORDS.value
        places = self.words + chunks * (CLASSES + 1)
        spans = places + CLASSES * stripes * ring
        held = magazines or 1 << (pages // 2).bit_length()
        state = torch.zeros(spans + held, dtype=torch.int64)
        state[layout.MAGAZINES.value] = spans
        state[layout.MAGAZINE_MASK.value] = held - 1
        state[layout.BASE.value] = base
        state[layout.STRIPES_AND_RING.value] = stripes + (ring.bit_length() - 1 << 16)
        state[layout.RECORDS.value] = records
        state[layout.ROWS.value] = self.words
        state[layout.PLACES.value] = places
        state[layout.CHUNKS.value] = chunks
        # Places begin with number 1, so that a ring of zeros has none that is open.
        state[layout.LINES.value : records : layout.LINE_STRIDE.value] = 1 << 32
        state[self.words : self.words + chunks] = -1
        if pages % 64:
            state[self.words + chunks - 1] = (1 << pages % 64) - 1
        self.handle = state.to(device)
        self.chunks = chunks

    def free_pages(self) -> list[int]:
        """The numbers of the free pages."""
        words = self.handle[self.words : self.words + self.chunks].tolist()
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
