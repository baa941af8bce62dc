"""A paged cache of keys and values: pages are taken and given back inside the decode graph.

A sequence that needs a page takes it in the kernel that writes to it; one that ends gives its pages
back, and another starts in its place. Without memory it waits for the next step.

Without a heap, the host keeps a list of free pages, and synchronises with the device in each step,
or one reserves room for the longest sequence everywhere.

Run it: ``python examples/paged_kv_cache.py`` (without a GPU: with ``TRITON_INTERPRET=1``).
"""

import torch
import triton
import triton.language as tl

import devalloc
from devalloc import kernels as da

PAGE = 16  # tokens; a page holds keys [head, token, dim], then values


@triton.jit
def append_kernel(heap, table, lengths, targets, turns, qkv,
                  TURNS: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr,
                  HEADS: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """One program for each sequence. ``targets``, lengths, stand for tokens that end sequences."""
    sequence = tl.program_id(0)
    pages = table + sequence * PAGES
    turn = tl.load(turns + sequence)
    length = tl.load(lengths + sequence)
    tl.debug_barrier()  # all threads have read what is written below
    if length == tl.load(targets + sequence * TURNS + turn % TURNS):
        page = tl.arange(0, PAGES)
        da.free(heap, tl.load(pages + page, mask=page * PAGE < length, other=0))
        tl.store(turns + sequence, turn + 1)
        length = length * 0
    if length % PAGE == 0:
        addr = da.malloc(heap, 4 * PAGE * HEADS * DIM)
        tl.store(pages + length // PAGE, addr)
    else:
        addr = tl.load(pages + length // PAGE)
    if addr != 0:
        part = tl.arange(0, 2 * HEADS)  # the keys of all heads, then the values
        place = da.pointer(heap, addr + 2 * DIM * (part * PAGE + length % PAGE), tl.float16)
        dim = tl.arange(0, DIM)[None, :]
        source = qkv + ((3 * sequence + 1) * HEADS + part)[:, None] * DIM + dim
        tl.store(tl.multiple_of(place[:, None], (16, 1)) + dim, tl.load(source))
        length += 1
    tl.store(lengths + sequence, length)


@triton.jit
def attend_kernel(heap, table, lengths, qkv, out, PAGES: tl.constexpr, PAGE: tl.constexpr,
                  HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr = 64):  # fmt: skip
    """One program for each sequence and head, which reads its pages a tile of tokens at a time."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    pages = table + sequence * PAGES
    length = tl.load(lengths + sequence)
    dim = tl.arange(0, DIM)
    query = tl.load(qkv + (3 * sequence * HEADS + head) * DIM + dim).to(tl.float32) / DIM**0.5
    token = tl.arange(0, TILE)
    page = tl.load(pages + token // PAGE, mask=token < length, other=0)
    most = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    result = tl.zeros((DIM,), tl.float32)
    for first in range(0, length, TILE):
        inside = first + token < length
        addr = page + 2 * DIM * (head * PAGE + token % PAGE)
        later = first + TILE + token  # the next tile's pages, so that they are there in time
        page = tl.load(pages + later // PAGE, mask=later < length, other=0)
        # One address for each token, aligned to 16, so that a load is of 16 bytes.
        place = tl.multiple_of(da.pointer(heap, addr, tl.float16, inside)[:, None], (16, 1))
        place += dim[None, :]
        key = tl.load(place, mask=inside[:, None], other=0.0)
        value = tl.load(place + PAGE * HEADS * DIM, mask=inside[:, None], other=0.0)
        score = tl.where(inside, tl.sum(key.to(tl.float32) * query[None, :], axis=1), -1e30)
        above = tl.maximum(most, tl.max(score, axis=0))
        weight = tl.exp(score - above)
        total = total * tl.exp(most - above) + tl.sum(weight, axis=0)
        result = result * tl.exp(most - above) + tl.sum(weight[:, None] * value, axis=0)
        most = above
    tl.store(out + (sequence * HEADS + head) * DIM + dim, result / tl.maximum(total, 1e-30))


class Decoder:
    """One attention layer. ``inputs``: (steps, sequences, heads * dim), repeated without end."""

    def __init__(self, heap, inputs, targets, heads: int, longest: int) -> None:
        device, (_, count, width) = heap.device, inputs.shape
        self.heap, self.inputs, self.targets, self.heads = heap, inputs, targets, heads
        self.pages = triton.next_power_of_2(triton.cdiv(longest, PAGE))
        self.weights = (torch.randn(width, 3 * width) / width**0.5).to(device, torch.float16)
        self.table = torch.zeros(count, self.pages, dtype=torch.int64, device=device)
        self.lengths, self.turns = torch.zeros(2, count, dtype=torch.int32, device=device)
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self.out = torch.zeros(count, width, dtype=torch.float16, device=device)

    def step(self) -> None:
        qkv = self.inputs.index_select(0, self.clock % len(self.inputs))[0] @ self.weights
        count, width = self.out.shape
        shape = {"PAGES": self.pages, "PAGE": PAGE, "HEADS": self.heads, "DIM": width // self.heads}
        append_kernel[(count,)](
            self.heap.handle, self.table, self.lengths, self.targets, self.turns, qkv,
            TURNS=self.targets.shape[1], **shape)  # fmt: skip
        attend_kernel[(count, self.heads)](
            self.heap.handle, self.table, self.lengths, qkv, self.out, **shape)  # fmt: skip
        self.clock.add_(1)

    def reference(self, sequence: int) -> torch.Tensor:
        """The last step's output by dense attention, in float32, without looking into the cache."""
        steps = torch.arange(int(self.clock - self.lengths[sequence]), int(self.clock))
        x = self.inputs[(steps % len(self.inputs)).to(self.out.device), sequence].float()
        q, k, v = (x @ self.weights.float()).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        return torch.nn.functional.scaled_dot_product_attention(q[:, -1:], k, v).flatten()


def main() -> None:
    on_gpu = torch.cuda.is_available() and not triton.knobs.runtime.interpret
    torch.manual_seed(0)
    sequences, heads, dim, longest = (64, 8, 64, 8192) if on_gpu else (4, 2, 16, 1024)
    steps = 500 if on_gpu else 40
    with devalloc.Heap("256MiB" if on_gpu else "1MiB") as heap:
        inputs = torch.randn(64, sequences, heads * dim).to(heap.device, torch.float16)
        targets = 200 * (1.2 * torch.randn(sequences, 64)).exp() * longest / 8192
        targets = targets.clamp(1, longest).int().to(heap.device)
        decoder = Decoder(heap, inputs, targets, heads, longest)
        decoder.step()  # compiles, too
        graph = torch.cuda.CUDAGraph() if on_gpu else None
        if graph:
            with torch.cuda.graph(graph):
                decoder.step()
        for _ in range(steps):
            graph.replay() if graph else decoder.step()
        heap.check()
        found = heap.stats()
    for sequence, out in enumerate(decoder.out.float()):
        torch.testing.assert_close(out, decoder.reference(sequence), rtol=2e-2, atol=2e-2)
    assert found.allocations - found.frees == triton.cdiv(decoder.lengths, PAGE).sum()
    print(
        f"{steps + 1} steps of {sequences} sequences, {int(decoder.turns.sum())} ended: as expected"
    )
    print(f"  pages taken, given back  {found.allocations:9}, {found.frees}")
    print(f"  the heap's pages, peak   {found.peak / 2**20:9.2f} MiB")
    print(f"  reserved for the longest {sequences * longest * heads * dim / 2**18:9.2f} MiB")


if __name__ == "__main__":
    main()
