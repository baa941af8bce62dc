"""Streams that launches go round."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Streams:
    """Streams that launches go round; none in the interpreter."""

    def __init__(self, device: torch.device, count: int) -> None:
        gpu = device.type == "cuda"
        self._all = [torch.cuda.Stream(device) for _ in range(count)] if gpu else []

    @contextlib.contextmanager
    def use(self, index: int) -> Iterator[None]:
        if not self._all:
            yield
            return
        with torch.cuda.stream(self._all[index % len(self._all)]):
            yield

    def fork(self) -> None:
        for stream in self._all:
            stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        for stream in self._all:
            torch.cuda.current_stream().wait_stream(stream)
