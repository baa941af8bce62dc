"""Decoding with a cache of keys and values: pages from a heap, taken in the graph; pages from a
list that the host keeps; or room for the longest sequence everywhere. The layer and the reference
are those of ``examples/paged_kv_cache.py``; the sequences are under way when a round begins."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl

import devalloc
from benchmarks.harness import WrongResult
from benchmarks.uses.measure import Input, Way, recorded, require_equal
from examples.paged_kv_cache import PAGE, Decoder

STEPS = 64


@triton.jit
def write_kernel(cache, table, lengths, qkv, PAGES: tl.constexpr, PAGE: tl.constexpr,
                 HEADS: tl.constexpr, DIM: tl.constexpr, PAGED: tl.constexpr):  # fmt: skip
    """Append this step's keys and values; one program for each sequence. With ``PAGED`` the table
    has the numbers of pages in the cache; else a sequence has one page of its own."""
    sequence = tl.program_id(0)
    length = tl.load(lengths + sequence)
    tl.debug_barrier()
    page = sequence.to(tl.int64)
    if PAGED:
        page = tl.load(table + sequence * PAGES + length // PAGE)
    part = tl.arange(0, 2 * HEADS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    source = qkv + ((3 * sequence + 1) * HEADS + part) * DIM + dim
    place = cache + ((page * 2 * HEADS + part) * PAGE + length % PAGE) * DIM + dim
    tl.store(place, tl.load(source))
    tl.store(lengths + sequence, length + 1)


@triton.jit
def attend_kernel(cache, table, lengths, qkv, out, PAGES: tl.constexpr, PAGE: tl.constexpr,
                  HEADS: tl.constexpr, DIM: tl.constexpr, PAGED: tl.constexpr,
                  TILE: tl.constexpr = 64):  # fmt: skip
    """That of the example, over one tensor."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    pages = table + sequence * PAGES
    length = tl.load(lengths + sequence)
    dim = tl.arange(0, DIM)
    query = tl.load(qkv + (3 * sequence * HEADS + head) * DIM + dim).to(tl.float32) / DIM**0.5
    token = tl.arange(0, TILE)
    page = token.to(tl.int64) * 0 + sequence
    if PAGED:
        page = tl.load(pages + token // PAGE, mask=token < length, other=0)
    most = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    result = tl.zeros((DIM,), tl.float32)
    for first in range(0, length, TILE):
        inside = first + token < length
        place = ((page * 2 * HEADS + head) * PAGE + (first + token) % PAGE)[:, None] * DIM
        place += dim[None, :]
        if PAGED:
            later = first + TILE + token
            page = tl.load(pages + later // PAGE, mask=later < length, other=0)
        key = tl.load(cache + place, mask=inside[:, None], other=0.0)
        value = tl.load(cache + place + PAGE * HEADS * DIM, mask=inside[:, None], other=0.0)
        score = tl.where(inside, tl.sum(key.to(tl.float32) * query[None, :], axis=1), -1e30)
        above = tl.maximum(most, tl.max(score, axis=0))
        weight = tl.exp(score - above)
        total = total * tl.exp(most - above) + tl.sum(weight, axis=0)
        result = result * tl.exp(most - above) + tl.sum(weight[:, None] * value, axis=0)
        most = above
    tl.store(out + (sequence * HEADS + head) * DIM + dim, result / tl.maximum(total, 1e-30))


@triton.jit
def turn_kernel(lengths, targets, turns, sequences, TURNS: tl.constexpr, LANES: tl.constexpr):
    """Sequences that have their length begin again; one a lane."""
    sequence = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = sequence < sequences
    turn = tl.load(turns + sequence, mask=there, other=0)
    length = tl.load(lengths + sequence, mask=there, other=0)
    ended = there & (length == tl.load(targets + sequence * TURNS + turn % TURNS, mask=there))
    tl.store(turns + sequence, turn + 1, mask=ended)
    tl.store(lengths + sequence, length * 0, mask=ended)


class Sequences:
    """An input: the layer's inputs, lengths at which sequences end, and lengths at the start."""

    def __init__(self, count: int, heads: int, dim: int, longest: int, device: torch.device):
        random = torch.Generator().manual_seed(count)
        self.device, self.count, self.heads, self.dim = device, count, heads, dim
        self.longest = longest
        self.inputs = torch.randn(64, count, heads * dim, generator=random)
        self.inputs = self.inputs.to(device, torch.float16)
        wide = 200 * (1.2 * torch.randn(count, 64, generator=random)).exp() * longest / 8192
        targets = wide.clamp(1, longest).int()
        self.first = (targets[:, 0] * torch.rand(count, generator=random)).int()
        self.targets = targets.to(device)
        self.page_bytes = 4 * PAGE * heads * dim
        self.clock = 64 * longest
        self.held = self._pages(self.layer().weights)
        self.last, self.most_pages = self._simulate(targets.numpy())

    def layer(self, heap: devalloc.Heap | None = None) -> Decoder:
        """The same weights in every layer."""
        torch.manual_seed(0)
        return Decoder(heap or self, self.inputs, self.targets, self.heads, self.longest)

    def _simulate(self, targets: np.ndarray) -> tuple[torch.Tensor, int]:
        """The lengths after a round, and the most pages that are taken at once."""
        length, turn = self.first.numpy().copy(), np.zeros(self.count, dtype=np.int64)
        most = 0
        for _ in range(STEPS):
            ended = length == targets[np.arange(self.count), turn % targets.shape[1]]
            length[ended] = 0
            turn += ended
            length += 1
            most = max(most, int((-(-length // PAGE)).sum()))
        return torch.from_numpy(length), most

    def _pages(self, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is in the cache at the start: ``(sequence, place, contents)`` of each page, with
        contents of shape (pages, 2, heads, PAGE, dim)."""
        held = -(-self.first // PAGE).long()
        sequence = torch.repeat_interleave(held)
        place = torch.arange(len(sequence)) - (held.cumsum(0) - held)[sequence]
        token = place[:, None] * PAGE + torch.arange(PAGE)
        step = (self.clock - self.first[sequence, None] + token) % len(self.inputs)
        sequence, place, step = (part.to(self.device) for part in (sequence, place, step))
        width = self.heads * self.dim
        kv = self.inputs[step, sequence[:, None]] @ weights[:, width:]
        kv = kv.view(-1, PAGE, 2, self.heads, self.dim).permute(0, 2, 3, 1, 4).contiguous()
        return sequence, place, kv


class Decoding(Way):
    """What the ways have in common."""

    steps = STEPS

    def __init__(self, given: Sequences, heap: devalloc.Heap | None) -> None:
        self.given, self.heap = given, heap
        self.layer = given.layer(heap)
        self.sizes = {"HEADS": given.heads, "DIM": given.dim}

    def begin(self) -> None:
        self.layer.lengths.copy_(self.given.first)
        self.layer.turns.zero_()
        self.layer.clock.fill_(self.given.clock)

    def attend(self, cache: torch.Tensor, paged: bool) -> None:
        """The layer over one tensor."""
        layer = self.layer
        page = PAGE if paged else self.given.longest
        qkv = layer.inputs.index_select(0, layer.clock % len(layer.inputs))[0] @ layer.weights
        write_kernel[(self.given.count,)](
            cache, layer.table, layer.lengths, qkv, layer.pages, page, **self.sizes, PAGED=paged
        )
        attend_kernel[(self.given.count, self.given.heads)](
            cache, layer.table, layer.lengths, qkv, layer.out, layer.pages, page, **self.sizes,
            PAGED=paged)  # fmt: skip
        layer.clock.add_(1)

    def check(self) -> int:
        require_equal(self.layer.lengths.cpu(), self.given.last, "lengths")
        wanted = torch.stack([self.layer.reference(i) for i in range(self.given.count)])
        worst = float((self.layer.out.float() - wanted).abs().max())
        if not worst < 2e-2:
            raise WrongResult(f"the output differs by {worst:.3g} from dense attention")
        return 0


class InHeap(Decoding):
    def __init__(self, given: Sequences) -> None:
        room = max(8 << 20, 2 * given.most_pages * given.page_bytes)
        super().__init__(given, devalloc.Heap(room, device=given.device))
        self.begin()
        self.step = recorded(self.layer.step, given.device)  # type: ignore[method-assign]

    def begin(self) -> None:
        assert self.heap is not None
        super().begin()
        self.heap.reset()
        sequence, place, contents = self.given.held
        sizes = torch.full_like(sequence, self.given.page_bytes)
        addrs = self.heap.malloc(sizes)
        offsets = torch.arange(len(sizes) + 1, device=sizes.device) * (self.given.page_bytes // 2)
        self.heap.scatter(contents.view(-1), offsets, addrs)
        self.layer.table[sequence, place] = addrs


class HostList(Decoding):
    """As many pages as are ever taken at once, and their numbers in a tensor that the host cuts
    from. The host has to ask which sequences ended, once in a step."""

    def __init__(self, given: Sequences) -> None:
        super().__init__(given, None)
        pages = given.most_pages
        self.cache = torch.empty(pages, given.page_bytes // 2, dtype=torch.float16,
                                 device=given.device)  # fmt: skip
        self.begin()
        self.manage()
        self.decode = recorded(lambda: self.attend(self.cache, True), given.device)

    def begin(self) -> None:
        super().begin()
        sequence, place, contents = self.given.held
        self.cache[: len(contents)] = contents.flatten(1)
        self.layer.table[sequence, place] = torch.arange(len(place), device=place.device)
        self.free = torch.arange(len(place), len(self.cache), device=place.device)
        self.known = self.given.first.numpy().copy()
        self.rows = torch.arange(self.given.count, device=place.device)

    def upload(self, numbers: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(numbers)
        if self.given.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.given.device, non_blocking=True)

    def manage(self) -> None:
        """Take the pages of sequences that ended, give pages to those that need one."""
        layer = self.layer
        turns = (layer.turns % layer.targets.shape[1]).long()
        ended = (layer.lengths == layer.targets[self.rows, turns]).cpu().numpy().nonzero()[0]
        if len(ended):
            rows = self.upload(ended)
            held = -(-self.known[ended] // PAGE)
            flat = np.concatenate([row * layer.pages + np.arange(count)
                                   for row, count in zip(ended, held, strict=True)])  # fmt: skip
            self.free = torch.cat([self.free, layer.table.view(-1)[self.upload(flat)]])
            layer.lengths.index_fill_(0, rows, 0)
            layer.turns.index_add_(0, rows, torch.ones_like(rows, dtype=torch.int32))
            self.known[ended] = 0
        needy = (self.known % PAGE == 0).nonzero()[0]
        if len(needy):
            if len(needy) > len(self.free):
                raise WrongResult(f"{len(needy)} pages wanted, {len(self.free)} free")
            place = self.upload(needy * layer.pages + self.known[needy] // PAGE)
            layer.table.view(-1).index_copy_(0, place, self.free[: len(needy)])
            self.free = self.free[len(needy) :]
        self.known += 1

    def step(self) -> None:
        self.manage()
        self.decode()


class Dense(Decoding):
    def __init__(self, given: Sequences) -> None:
        super().__init__(given, None)
        shape = given.count, 2, given.heads, given.longest, given.dim
        self.cache = torch.zeros(shape, dtype=torch.float16, device=given.device)
        self.begin()
        self.step = recorded(self.decode, given.device)  # type: ignore[method-assign]

    def begin(self) -> None:
        super().begin()
        sequence, place, contents = self.given.held
        pages = self.cache.view(*self.cache.shape[:3], -1, PAGE, self.given.dim)
        pages[sequence, :, :, place] = contents

    def decode(self) -> None:
        layer, lanes = self.layer, 128
        turn_kernel[(triton.cdiv(self.given.count, lanes),)](
            layer.lengths, layer.targets, layer.turns, self.given.count,
            TURNS=layer.targets.shape[1], LANES=lanes)  # fmt: skip
        self.attend(self.cache, False)


def inputs(device: torch.device) -> Iterator[Input]:
    real = device.type == "cuda"
    shape = (8, 64, 8192) if real else (2, 16, 128)
    ways = {"heap": InHeap, "host's list": HostList, "reserved": Dense}
    for count in (1, 16, 128, 512) if real else (1, 3):
        given = Sequences(count, *shape, device)
        result = int(given.last.sum()) * given.page_bytes // PAGE
        yield Input("cache", f"batch-{count}", count, result, {
            way: lambda kind=kind, given=given: kind(given) for way, kind in ways.items()
        })  # fmt: skip
