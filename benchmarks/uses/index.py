"""An inverted index while text streams in: lists in a heap; everything sorted again for each batch;
or the sorted batch merged into the rows, which are copied. The lists are those of
``examples/inverted_index.py``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import devalloc
from benchmarks.uses.measure import Input, Way, require_equal
from examples.inverted_index import Index, library_text


class Stream(Way):
    """``text``: numbers of words, which arrive in ``steps`` batches."""

    def __init__(self, text: torch.Tensor, words: int, steps: int) -> None:
        self.text, self.words, self.steps = text, words, steps
        self.batches = text.tensor_split(steps)
        self.all_words = torch.arange(words + 1, dtype=torch.int32, device=text.device)

    def begin(self) -> None:
        self.waiting = iter(self.batches)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def check(self) -> int:
        values, offsets = self.rows()
        text, order = torch.sort(self.text, stable=True)
        require_equal(values, order.int(), "positions")
        require_equal(offsets, torch.searchsorted(text, self.all_words), "offsets")
        return 0


class InHeap(Stream):
    def __init__(self, text: torch.Tensor, words: int, steps: int) -> None:
        super().__init__(text, words, steps)
        # Half of the lists' last chunks may be empty, and the longest chunks are runs of MiBs that
        # have to fit between pages of small ones. Capacity is not compared; pages in use are.
        self.heap = devalloc.Heap(max(8 << 20, 48 * len(text)), device=text.device)
        self.index = Index(self.heap, words)

    def begin(self) -> None:
        super().begin()
        assert self.heap is not None
        self.heap.reset()
        self.index.chunks.zero_()
        self.index.lengths.zero_()
        self.index.tokens = 0

    def step(self) -> None:
        self.index.add(next(self.waiting))

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.index.rows()


class Sorted(Stream):
    """(The text so far is a view of all of it: nothing is copied to append a batch.)"""

    def begin(self) -> None:
        super().begin()
        self.tokens = 0
        self.order = self.offsets = torch.empty(0)

    def step(self) -> None:
        self.tokens += len(next(self.waiting))
        text, order = torch.sort(self.text[: self.tokens], stable=True)
        self.order = order.int()
        self.offsets = torch.searchsorted(text, self.all_words)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.order, self.offsets


class Merged(Stream):
    def begin(self) -> None:
        super().begin()
        self.sorted = self.text[:0]
        self.values = self.text[:0].int()

    def step(self) -> None:
        batch, order = torch.sort(next(self.waiting), stable=True)
        old, new = len(self.sorted), len(batch)
        # An old entry moves by the new ones of smaller words; new ones come after their word's old.
        before = torch.searchsorted(batch, self.all_words)
        after = torch.searchsorted(self.sorted, self.all_words)
        at = torch.arange(old, device=batch.device) + before[self.sorted]
        at_new = torch.arange(new, device=batch.device) + after[batch.long() + 1]
        words = torch.empty(old + new, dtype=batch.dtype, device=batch.device)
        values = torch.empty_like(words)
        for target, kept, added in ((words, self.sorted, batch),
                                    (values, self.values, (order + old).int())):  # fmt: skip
            target[at] = kept
            target[at_new] = added
        self.sorted, self.values = words, values
        self.offsets = before + after

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values, self.offsets


def zipf(tokens: int, words: int, device: torch.device) -> torch.Tensor:
    """Words by rank, as often as in texts: the exponent is 1.05."""
    random = torch.Generator().manual_seed(0)
    share = torch.arange(1, words + 1, dtype=torch.float64) ** -1.05
    upto = (share.cumsum(0) / share.sum()).to(device)
    drawn = torch.rand(tokens, generator=random, dtype=torch.float64).to(device)
    return torch.searchsorted(upto, drawn).clamp(max=words - 1).int()


def inputs(device: torch.device) -> Iterator[Input]:
    real = device.type == "cuda"
    words, steps = (200_000, 100) if real else (500, 3)
    text, found = library_text(files=1000 if real else 3)
    streams = {
        "zipf": (zipf(20_000_000 if real else 2000, words, device), words),
        "library": (text.to(device), len(found)),
    }
    ways = {"heap": InHeap, "sorted anew": Sorted, "merged": Merged}
    for name, (tokens, many) in streams.items():
        yield Input("index", name, len(tokens), 4 * len(tokens), {
            way: lambda kind=kind, tokens=tokens, many=many: kind(tokens, many, steps)
            for way, kind in ways.items()
        })  # fmt: skip
