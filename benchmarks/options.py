"""What the benchmarks' commands have in common: a device that is there, and numbers like 1e9."""

from __future__ import annotations

import math
from typing import Any

import click


class Count(click.ParamType):
    """A whole number of at least 1, which may be written as 1e9."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 1 <= number < 1 << 62:
            self.fail(f"{value!r} is not a number from 1 to 4.6e18, such as 1e6", param, ctx)
        return int(number)


def require_device(name: str) -> None:
    """Refuse ``--device cuda`` where there is none, before anything is started.

    Raises
    ------
    click.ClickException
    """
    if name != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA device; --device cpu runs without one")
