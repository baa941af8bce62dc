"""The programs whose memory is recorded: four ways in which PyTorch is used, on synthetic data.

Each takes a device and whether to run in miniature, to see on any machine that it works.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

SEED = 20260801


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def convolution_training(device: torch.device, tiny: bool = False) -> None:
    """A residual network of 18 layers on 224 x 224 images: training and evaluation in turn, with
    a last batch that is smaller. cuDNN tries algorithms, whose workspaces come and go."""
    torch.manual_seed(SEED)
    torch.backends.cudnn.benchmark = True
    width, pixels, full, rest, evaluated = (8, 64, 3, 2, 4) if tiny else (64, 224, 64, 23, 200)
    stages = [(width, width, 1)] * 2
    for factor in (1, 2, 4):
        stages += [(factor * width, 2 * factor * width, 2), (2 * factor * width,) * 2 + (1,)]
    model = nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *(ResidualBlock(*stage) for stage in stages),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, 1000),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(1 if tiny else 2):
        model.train()
        for size in [full] * (1 if tiny else 12) + [rest]:
            images = torch.randn(size, 3, pixels, pixels).to(device)
            labels = torch.randint(1000, (size,)).to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            loss.item()
        model.eval()
        with torch.no_grad():
            for size in (evaluated, rest):
                model(torch.randn(size, 3, pixels, pixels).to(device)).argmax(1).cpu()


class Attention(nn.Module):
    """Self-attention of several heads; with a cache it appends to it and attends to all of it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.project(x).chunk(3, dim=-1)
        )
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.out(y.transpose(1, 2).reshape(batch, length, width)), (k, v)


class TransformerLayer(nn.Module):
    """Attention and a feed-forward network, each behind a normalisation and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(
        self, x: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        attended, cache = self.attention(self.before_attention(x), cache)
        x = x + attended
        return x + self.feed_forward(x), cache


class Transformer(nn.Module):
    """A decoder over a vocabulary of 32,000."""

    VOCABULARY = 32_000

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.VOCABULARY, width)
        self.layers = nn.ModuleList(TransformerLayer(width, heads) for _ in range(layers))
        self.out = nn.Linear(width, self.VOCABULARY, bias=False)

    def forward(
        self, tokens: torch.Tensor, caches: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        x, grown = self.embed(tokens), []
        for index, layer in enumerate(self.layers):
            x, cache = layer(x, caches[index] if caches else None)
            grown.append(cache)
        return self.out(x), grown


def transformer_training(device: torch.device, tiny: bool = False) -> None:
    """A decoder of 8 layers in mixed precision; every batch has another length of sequence."""
    torch.manual_seed(SEED)
    draw = random.Random(SEED)
    layers, width, batch, longest = (2, 32, 2, 24) if tiny else (8, 512, 16, 1024)
    model = Transformer(layers, width, heads=8).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(2 if tiny else 60):
        length = draw.randint(longest // 8, longest)
        tokens = torch.randint(Transformer.VOCABULARY, (batch, length + 1)).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            logits, _ = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        optimizer.step()
        loss.item()


@torch.no_grad()
def generation(device: torch.device, tiny: bool = False) -> None:
    """Requests that come and go: each has its own key and value caches, which grow by one token a
    step, by concatenation, until the request is done and the next one takes its place."""
    torch.manual_seed(SEED)
    draw = random.Random(SEED)
    layers, width, together, steps = (2, 32, 2, 6) if tiny else (8, 1024, 8, 64)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = Transformer(layers, width, heads=16).to(device, dtype).eval()
    active: list[tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], int]] = []
    for _ in range(steps):
        while len(active) < together:
            prompt = draw.randint(4, 8) if tiny else draw.randint(64, 2048)
            tokens = torch.randint(Transformer.VOCABULARY, (1, prompt)).to(device)
            logits, caches = model(tokens)
            done_after = draw.randint(2, 4) if tiny else draw.randint(10, 50)
            active.append((logits[:, -1:].argmax(-1), caches, done_after))
        going_on = []
        for token, caches, left in active:
            logits, caches = model(token, caches)
            if left > 1:
                going_on.append((logits[:, -1:].argmax(-1), caches, left - 1))
        active = going_on


class MnistNet(nn.Module):
    """TinyTorch's example network, which is PyTorch's: two convolutions, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def mnist(device: torch.device, tiny: bool = False) -> None:
    """One epoch as TinyTorch runs it: 60,000 images in batches of 64 by AdaDelta, then 10,000 in
    batches of 1000."""
    torch.manual_seed(SEED)
    images, tested = (128, 1000) if tiny else (60_000, 10_000)
    model = MnistNet().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for index, first in enumerate(range(0, images, 64)):
        size = min(64, images - first)
        pixels = torch.randn(size, 1, 28, 28).to(device)
        target = torch.randint(10, (size,)).to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(pixels), target)
        loss.backward()
        optimizer.step()
        if index % 10 == 0:
            loss.item()
    model.eval()
    with torch.no_grad():
        for _ in range(0, tested, 1000):
            pixels = torch.randn(1000, 1, 28, 28).to(device)
            target = torch.randint(10, (1000,)).to(device)
            output = model(pixels)
            F.nll_loss(output, target, reduction="sum").item()
            (output.argmax(1, keepdim=True) == target.view(-1, 1)).sum().item()


WORKLOADS = {
    "convolution-training": convolution_training,
    "transformer-training": transformer_training,
    "generation": generation,
    "mnist": mnist,
}
