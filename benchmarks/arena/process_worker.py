"""One training run in a process of its own: reads what to run, writes what it did, as JSON.

The first line of the input says what to run. When the process is warm it says so, and then takes as
many timed steps at a time as each further line says, and before them one that is not timed. When
the input ends, it writes its losses, its peak and what is left.

``gpt2``: GPT2LMHeadModel of the transformers package, 6 layers, 512 wide, 8 heads, vocabulary 8000,
fp32 with TF32, batch 8, AdamW; 40 steps of lengths from 64 to 900, then the timed steps of 512.
``resnet50``: that of timm, batch 64, SGD. ``tiny``: a few layers, to try this on the CPU.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

Step = Callable[[int], torch.Tensor]
"""Trains on one batch, whose length is given where lengths vary; returns the loss."""


def gpt2(device: torch.device) -> tuple[Step, list[int], int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=8000, n_positions=1024)
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(length: int) -> torch.Tensor:
        tokens = torch.randint(8000, (8, length)).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    lengths = random.Random(1)
    return step, [lengths.randint(64, 900) for _ in range(40)], 512


def resnet50(device: torch.device) -> tuple[Step, list[int], int]:
    import timm

    model = timm.create_model("resnet50", pretrained=False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(length: int) -> torch.Tensor:
        images = torch.randn(64, 3, length, length, device=device)
        labels = torch.randint(1000, (64,), device=device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [224] * 10, 224


def tiny(device: torch.device) -> tuple[Step, list[int], int]:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(length: int) -> torch.Tensor:
        loss = model(torch.randn(length, 16).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [4, 8, 12], 8


MODELS = {"gpt2": gpt2, "resnet50": resnet50, "tiny": tiny}


@contextlib.contextmanager
def allocator(mode: str, policy: str, front: bool) -> Iterator[Any]:
    """Gives the arena whose memory is used, or None for PyTorch's own allocator."""
    if mode == "torch":
        yield None
        return
    import devalloc

    if mode == "install":
        yield devalloc.Arena.install(policy=policy, front=front)
        return
    with devalloc.Arena("cuda", policy=policy) as arena, arena.use():
        yield arena


def peak_of(arena: Any) -> int:
    if arena is None:
        return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    stats = arena.stats()
    return stats["reserved_bytes.all.peak"] + stats["outside_bytes.current"]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def run(model: str, arena: Any, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    step, warm, timed = MODELS[model](device)
    losses = [step(length) for length in warm]
    synchronize()
    say({"warm": len(losses)})
    for line in sys.stdin:
        # After the other processes' turns the caches are theirs.
        losses.append(step(timed))
        synchronize()
        milliseconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            losses.append(step(timed))
            synchronize()
            milliseconds.append((time.perf_counter() - begin) * 1e3)
        say({"milliseconds": milliseconds})
    return {"losses": [float(loss) for loss in losses], "peak": peak_of(arena)}


def share_cores(count: int) -> None:
    """Run on the same few cores as the other processes: only one of them works at a time, and the
    cores of one machine are not equally fast."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def left_over(arena: Any) -> int:
    """Bytes that are still allocated when everything is gone."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    if arena is None:
        return torch.cuda.memory_allocated()
    arena.empty_cache()
    arena.cache.audit()
    return arena.memory_allocated()


def main() -> None:
    order = json.loads(sys.stdin.readline())
    share_cores(order["cores"])
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    with allocator(order["mode"], order["policy"], order["front"]) as arena:
        device = torch.device(order["device"])
        done = run(order["model"], arena, device)
        done["left"] = left_over(arena)
    say(done)


if __name__ == "__main__":
    main()
