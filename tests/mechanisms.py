"""What the known allocators do, what does it here, and the tests that prove it.

``tests/mechanisms.csv`` lists the mechanisms: id, words, and the option that turns it on here, or
one of `REASONS` with a reason why there is nothing to prove. A test says what it proves with
``@pytest.mark.proves("id", ...)``. ``python -m tests.mechanisms`` writes docs/mechanisms.md.
"""

from __future__ import annotations

import ast
import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mechanisms.csv"
DOCUMENT = ROOT / "docs" / "mechanisms.md"

REASONS = ("replaced", "not yet", "left out")

TITLES = {
    "tiny": 'TinyTorch: policy "tiny"',
    "torch": 'PyTorch: policy "torch"',
    "bfc": 'TensorFlow, XLA: policy "bfc"',
    "auto_growth": 'Paddle: policy "auto_growth"',
    "frugal": 'Policy "frugal"',
    "rmm": "RMM",
    "saver": "torch_memory_saver",
    "library": "Arenas, and other libraries in them",
}
"""By the part of an id before the slash."""


class Mechanism(NamedTuple):
    id: str
    words: str
    option: str


def mechanisms(text: str | None = None) -> list[Mechanism]:
    """All that are listed, in order."""
    lines = (LIST.read_text() if text is None else text).splitlines()
    return [Mechanism(*row) for row in csv.reader(lines[1:])]


def marks(source: str) -> Iterator[tuple[str, str]]:
    """(id, test) of each mark in the source of a test module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.proves":
                    yield from ((ast.literal_eval(each), node.name) for each in mark.args)


def proofs() -> dict[str, list[str]]:
    """The tests of each id, as ``file::test`` below the folder of tests."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT / "tests").with_suffix("").as_posix()
        for each, test in marks(path.read_text()):
            found[each].append(f"{name}::{test}")
    return dict(found)


def problems(listed: list[Mechanism], proved: dict[str, list[str]]) -> list[str]:
    """Mechanisms without a test and without a reason, and marks of what is not listed."""
    known = {each.id for each in listed}
    wrong = [f"{each}: not in {LIST.name}" for each in sorted(set(proved) - known)]
    for each in listed:
        reasoned = each.option.startswith(REASONS)
        if each.id not in proved and not reasoned:
            wrong.append(f"{each.id}: no test proves it, and no reason is given")
        if each.id.partition("/")[0] not in TITLES:
            wrong.append(f"{each.id}: no title for it")
    return wrong + [
        f"{each}: listed twice" for each in known if sum(each == m.id for m in listed) > 1
    ]


def markdown(listed: list[Mechanism], proved: dict[str, list[str]]) -> str:
    """The document."""
    parts = [
        "# Mechanisms and their tests",
        "Made by `python -m tests.mechanisms` from `tests/mechanisms.csv` and the marks "
        "`@pytest.mark.proves` of the tests. Of each: what it is, what turns it on here or why it "
        "is left out, and its tests below `tests/`.",
    ]
    for prefix, title in TITLES.items():
        rows = []
        for each in listed:
            if each.id.startswith(f"{prefix}/"):
                tests = ", ".join(f"`{test}`" for test in proved.get(each.id, []))
                said = ". ".join(filter(None, (each.words, each.option, tests)))
                rows.append(f"- {said}")
        parts += [f"## {title}", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    DOCUMENT.write_text(markdown(mechanisms(), proofs()))
    print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
