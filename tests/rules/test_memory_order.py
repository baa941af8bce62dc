"""Every atomic and fence of the device code has its line in docs/design/memory-order.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "design" / "memory-order.md"
ROW = re.compile(r"^\| `(\w+)` \| ([\w., ]+) \| \S", re.M)


def operations(function: ast.FunctionDef) -> Iterator[str]:
    """The atomics and fences of a function, in the order of the text: ``add``, ``or.acquire``."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        name = ast.unparse(call.func).rpartition(".")[2]
        if name.startswith("atomic_") or name == "fence":
            words = [k.value for k in call.keywords if k.arg == "sem"]
            words += call.args[1:] if name == "fence" else []
            order = {getattr(word, "value", "sem") for word in words}
            marks = [f".{word}" for word in order - {"relaxed"}]
            yield name.removeprefix("atomic_") + "".join(marks)


def used(source: str) -> dict[str, str]:
    """Of each function that has any, its operations."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    found = {function.name: ", ".join(operations(function)) for function in functions}
    return {name: text for name, text in found.items() if text}


def test_every_atomic_has_its_line() -> None:
    found = {}
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        found.update(used(path.read_text()))
    assert dict(ROW.findall(DOCUMENT.read_text())) == found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tl.atomic_add(p, 1, sem='relaxed')", "add"),
        ("tl.atomic_xchg(p, 1, sem='acquire')\n    fence(p)", "xchg.acquire, fence"),
        ("x = atomic_load(p) + atomic_load(q)", "load, load"),
        ("atomics.fence(p)\n    atomic_cas(p, a, b)", "fence, cas"),
        ("fence(p, 'release')\n    tl.atomic_xchg(p, 1, sem=sem)", "fence.release, xchg.sem"),
    ],
)
def test_operations_are_found(text: str, expected: str) -> None:
    assert used(f"def f(p):\n    {text}\n\ndef g(p):\n    return p") == {"f": expected}
