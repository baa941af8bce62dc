"""One case of `benchmarks.arena.bench_regions` with torch_memory_saver, in a process of its own.

Reads what to do as JSON on standard input and writes what was measured as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from benchmarks.arena.bench_regions import Region, measure


class SaverRegion(Region):
    """The same tensors in a region of torch_memory_saver; ``saver`` is its object of that name."""

    def __init__(self, saver: Any, case: str, device: torch.device, nbytes: int, blocks: int
                 ) -> None:  # fmt: skip
        self.saver = saver
        saver.hook_mode = "torch"
        self.keep = case == "cpu, kept"
        super().__init__(device, nbytes, blocks, None if case == "no backup" else "cpu")

    def allocate(self, size: int, blocks: int) -> list[torch.Tensor]:
        with self.saver.region("measured", enable_cpu_backup=self.backup is not None):
            if self.keep:
                self.saver.retain_cpu_backup = True
            return [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(blocks)]

    def sleep(self) -> None:
        self.saver.pause("measured")

    def wake(self) -> None:
        self.saver.resume("measured")

    @property
    def kept(self) -> int | None:
        return None

    def close(self) -> None:
        self.tensors.clear()


def main() -> None:
    wanted = json.loads(sys.stdin.read())
    sys.path.insert(0, wanted["path"])
    from torch_memory_saver import torch_memory_saver

    region = SaverRegion(
        torch_memory_saver,
        wanted["case"],
        torch.device(wanted["device"]),
        wanted["nbytes"],
        wanted["blocks"],
    )
    found = list(measure(region, False, wanted["rounds"]))
    print(json.dumps({"found": found, "nbytes": region.nbytes, "check": region.check()}))


if __name__ == "__main__":
    main()
