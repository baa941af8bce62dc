"""An inverted index: for each word where it occurs, in lists that grow while the text streams in.

A list is a few chunks, each twice as long as the one before, so nothing is ever copied and a place
in the list says in which chunk it is. A batch of text is sorted by word. Then one kernel, a word a
lane, takes the chunks that the lists need from the heap, and another, a token a lane, writes the
positions. What a batch costs depends on the batch, and not on all the text so far.

Without a heap one sorts everything again for each batch, or copies everything to longer rows.

Run it: ``python examples/inverted_index.py`` (without a GPU: with ``TRITON_INTERPRET=1``).
"""

import re
import sysconfig
from pathlib import Path

import torch
import triton
import triton.language as tl

import devalloc
from devalloc import kernels as da

CHUNKS, FIRST = 24, 4  # at most so many chunks to a list, and elements in the first one


@triton.jit
def reserve_kernel(heap, starts, chunks, lengths, words,
                   CHUNKS: tl.constexpr, FIRST: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Take the chunks that lists will need; one word a lane. ``starts``: where each word's tokens
    begin in the sorted batch."""
    word = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = word < words
    length = tl.load(lengths + word, mask=there, other=0)
    more = tl.load(starts + word + 1, mask=there, other=0)
    more -= tl.load(starts + word, mask=there, other=0)
    for chunk in range(CHUNKS):
        begin = FIRST * ((1 << chunk) - 1)  # the place in the list of the chunk's first element
        new = (length <= begin) & (begin < length + more)
        if tl.max(new.to(tl.int32), axis=0) > 0:
            addr = da.malloc(heap, 4 * FIRST << chunk, new)
            tl.store(chunks + word * CHUNKS + chunk, addr, mask=new)


@triton.jit
def append_kernel(heap, batch, order, starts, chunks, lengths, tokens, position,
                  CHUNKS: tl.constexpr, FIRST: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Write positions to the lists; one token of the sorted batch a lane."""
    token = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = token < tokens
    word = tl.load(batch + token, mask=there, other=0)
    place = tl.load(lengths + word, mask=there, other=0) + token
    place -= tl.load(starts + word, mask=there, other=0)
    # The chunk is the power of two in place / FIRST + 1, which is the exponent of a float32.
    chunk = ((place // FIRST + 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    addr = tl.load(chunks + word * CHUNKS + chunk, mask=there, other=0)
    there = there & (addr != 0)  # else malloc gave nothing, which the heap has recorded
    element = place - FIRST * ((1 << chunk) - 1)
    value = (position + tl.load(order + token, mask=there, other=0)).to(tl.int32)
    tl.store(da.pointer(heap, addr + 4 * element, tl.int32, there), value, mask=there)


class Index:
    """Lists of positions of ``words`` words. No memory is moved, and the host waits for nothing."""

    def __init__(self, heap: devalloc.Heap, words: int) -> None:
        self.heap, self.words, self.tokens = heap, words, 0
        self.chunks = torch.zeros(words, CHUNKS, dtype=torch.int64, device=heap.device)
        self.lengths = torch.zeros(words, dtype=torch.int32, device=heap.device)
        self.all_words = torch.arange(words + 1, dtype=torch.int32, device=heap.device)
        self.lanes = 1024 if heap.device.type == "cpu" else 128  # the interpreter needs wide ones

    def add(self, batch: torch.Tensor) -> None:
        """Append a batch of text: the numbers of its words."""
        batch, order = torch.sort(batch, stable=True)
        starts = torch.searchsorted(batch, self.all_words, out_int32=True)
        shape = {"CHUNKS": CHUNKS, "FIRST": FIRST, "LANES": self.lanes}
        reserve_kernel[(triton.cdiv(self.words, self.lanes),)](
            self.heap.handle, starts, self.chunks, self.lengths, self.words, **shape)  # fmt: skip
        append_kernel[(triton.cdiv(len(batch), self.lanes),)](
            self.heap.handle, batch, order, starts, self.chunks, self.lengths,
            len(batch), self.tokens, **shape)  # fmt: skip
        self.lengths += starts.diff()
        self.tokens += len(batch)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All lists end to end, and the offsets of the words."""
        begins = FIRST * (2 ** torch.arange(CHUNKS, device=self.lengths.device) - 1)
        held = (self.lengths[:, None] - begins).clamp(min=0)
        held = torch.minimum(held, begins + FIRST)  # a chunk is as long as all before, and FIRST
        values, offsets = self.heap.gather(self.chunks, held, torch.int32)
        return values, offsets[::CHUNKS]


def library_text(files: int) -> tuple[torch.Tensor, list[str]]:
    """The words of Python's standard library, as numbers, and the words."""
    numbers: dict[str, int] = {}
    text: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]:
        for word in re.findall(r"\w+", path.read_text(errors="replace")):
            text.append(numbers.setdefault(word, len(numbers)))
    return torch.tensor(text, dtype=torch.int32), list(numbers)


def main() -> None:
    on_gpu = torch.cuda.is_available() and not triton.knobs.runtime.interpret
    text, words = library_text(files=1000 if on_gpu else 5)
    batches = 100 if on_gpu else 4
    with devalloc.Heap("64MiB" if on_gpu else "4MiB") as heap:
        text = text.to(heap.device)
        index = Index(heap, len(words))
        for batch in text.tensor_split(batches):
            index.add(batch)
        heap.check()
        values, offsets = index.rows()
        found = heap.stats()

    sorted_text, order = torch.sort(text, stable=True)
    assert torch.equal(values, order.int())
    assert torch.equal(offsets, torch.searchsorted(sorted_text, index.all_words))

    longest, kib = int(index.lengths.argmax()), 1 << 10
    print(f"{len(text)} tokens, {len(words)} words, {batches} batches: all as expected")
    print(f"  the longest list         {int(index.lengths.max()):9} of {words[longest]!r}")
    print(f"  chunks                   {found.allocations:9}")
    print(f"  positions alone          {4 * len(text) / kib:9.0f} KiB")
    print(f"  the heap's pages, peak   {found.peak / kib:9.0f} KiB")


if __name__ == "__main__":
    main()
