"""Programs of one launch that hand each other blocks.

Every program writes letters of different lengths and leaves each in one of a few mailboxes. If the
box has a letter already, the program takes it out, reads it and frees it: memory that another
program of the same launch has allocated. No program waits for another.

Run it: ``python examples/mailboxes.py`` (without a GPU: with ``TRITON_INTERPRET=1``).
"""

import torch
import triton
import triton.language as tl

import devalloc
from devalloc import kernels as da

LETTERS = 8
PROGRAMS, BOXES = 16, 7


@triton.jit
def send_kernel(heap, boxes, sums, LETTERS: tl.constexpr, BOXES: tl.constexpr):
    """``sums``: two numbers per program, the sum of what it wrote and of what it read."""
    me = tl.program_id(0)
    word = tl.arange(0, 128)
    written = tl.zeros((), tl.int64)
    read = tl.zeros((), tl.int64)
    for turn in range(LETTERS):
        length = 1 + (me * 31 + turn * 17) % 100
        addr = da.malloc(heap, 8 * (length + 1))  # one block for the program
        if addr != 0:
            letter = addr.to(tl.pointer_type(tl.int64))
            tl.store(letter, length.to(tl.int64))
            tl.store(letter + 1 + word, (word + me).to(tl.int64), mask=word < length)
            written += tl.sum(tl.where(word < length, word + me, 0).to(tl.int64), axis=0)
            # All threads must have written before one of them publishes the letter.
            tl.debug_barrier()
            got = tl.atomic_xchg(boxes + (me + turn) % BOXES, addr, sem="acq_rel")
            if got != 0:
                letter = got.to(tl.pointer_type(tl.int64))
                inside = word < tl.load(letter)
                read += tl.sum(tl.load(letter + 1 + word, mask=inside, other=0), axis=0)
                da.free(heap, got)
    tl.store(sums + me * 2, written)
    tl.store(sums + me * 2 + 1, read)


def main() -> None:
    with devalloc.Heap("4MiB") as heap:
        boxes = torch.zeros(BOXES, dtype=torch.int64, device=heap.device)
        sums = torch.zeros(PROGRAMS, 2, dtype=torch.int64, device=heap.device)
        send_kernel[(PROGRAMS,)](heap.handle, boxes, sums, LETTERS=LETTERS, BOXES=BOXES)
        written, read = sums.sum(0).tolist()
        left = 0
        for addr in boxes[boxes != 0].tolist():
            length = int(heap.tensor(addr, 1, torch.int64))
            left += int(heap.tensor(addr, length + 1, torch.int64)[1:].sum())
        heap.free(boxes)
        print(f"written {written}, read {read}, left in the boxes {left}")
        assert written == read + left
        assert heap.stats().used == 0


if __name__ == "__main__":
    main()
