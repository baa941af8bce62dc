"""No word that another program may change is read by a plain load.

Every thread of a Triton program that holds a copy of a value performs the ``tl.load`` itself, so
when the word changes meanwhile the copies differ inside one program, and so do the branches taken
from them. Mutable words are read by ``atomic_load`` only. This check reads the sources of the
device code: a load may stand only in the functions listed here, each with the reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

# "module.function" -> why what it loads cannot change while it looks.
ALLOWED = {
    "target.assembly": "whatever others make of it: they are listed, too",
    "bits.divide": "instructions that read no memory",
    "bits.join": "instructions that read no memory",
    "groups.alike": "instructions that read no memory",
    "groups.last_start": "instructions that read no memory",
    "bits.shift_left": "instructions that read no memory",
    "target.anew": "instructions that read no memory",
    "atomics.atomic_load": "only where no two threads read for one lane",
    "atomics.fence": "instructions that read no memory: the fence",
    "layout.load_immutable": "geometry words are written before the heap is handed to any kernel",
    "layout.load_half": "the same words",
    "growing.ring": "instructions that read no memory",
    "upkeep.take_chunks_kernel": "the tensors of chunks; no program writes them meanwhile",
    "payload.fill": "payload of realloc: both blocks belong to the caller, no branch reads it",
    "debug.guards.load_once": "a tile without copies: one thread reads each word",
    "debug.guards.load_entry": "the entry of the caller's block; no wrong free changes its value",
    "debug.guards.near_wrong": "a tile without copies: one thread reads each word",
    "debug.guards.front_wrong": "a tile without copies: one thread reads each word",
    "debug.guards.load_head": "a tile without copies: one thread reads each word",
    "debug.guards.write_guards": "the caller's own words, to be written back; no branch reads them",
    "debug.guards.span_changed": "a tile without copies: one thread reads each word",
    "debug.guards.scan": "a tile without copies: one thread reads each word",
    "debug.debug_upkeep.audit_kernel": "entries; the heap is at rest",
    "debug.debug_upkeep.malloc_tagged_kernel": "the tensor of requests; no program writes it then",
    "upkeep.malloc_kernel": "the tensor of requests; no program writes it meanwhile",
    "upkeep.free_kernel": "the tensor of addresses; no program writes it meanwhile",
    "upkeep.usable_size_kernel": "the tensor of addresses; no program writes it meanwhile",
}

# Functions that read memory, or may, without being an atomic, however it is spelled.
READS = {"load", "load_tensor_descriptor", "make_block_ptr", "gather", "inline_asm_elementwise"}
ASSEMBLY = "assembly"


def plain_loads(source: str, module: str) -> Iterator[tuple[str, int]]:
    """Yield ("module.function", line) for every mention of a reading function.

    A mention and not only a call: an alias such as ``read = tl.load`` is found where it is made.
    """

    def visit(node: ast.AST, where: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inner = where
            if isinstance(child, ast.FunctionDef) and where == module:
                inner = f"{module}.{child.name}"
            elif isinstance(child, ast.Attribute) and child.attr in {*READS, ASSEMBLY}:
                # tl.gather moves lanes of one block and reads no memory; a descriptor's does.
                if not (child.attr == "gather" and ast.unparse(child.value) == "tl"):
                    yield where, child.lineno
            elif isinstance(child, ast.Name) and child.id == ASSEMBLY:
                yield where, child.lineno
            elif isinstance(child, ast.ImportFrom):
                for name in child.names:
                    if name.name in READS:
                        yield where, child.lineno
            yield from visit(child, inner)

    yield from visit(ast.parse(source), module)


def loads_in_kernels() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for path in sorted(KERNELS.glob("**/*.py")):
        module = ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        for function, line in plain_loads(path.read_text(), module):
            found.setdefault(function, []).append(line)
    return found


def test_plain_loads_stand_only_where_they_are_allowed() -> None:
    wrong = {name: lines for name, lines in loads_in_kernels().items() if name not in ALLOWED}
    assert not wrong, (
        f"plain loads at (function: lines) {wrong}: read a mutable word with atomic_load; "
        f"if it cannot change, say why in {Path(__file__).name}"
    )


def test_no_permission_is_stale() -> None:
    assert set(ALLOWED) <= set(loads_in_kernels())


@pytest.mark.parametrize(
    "body",
    [
        "return tl.load(ptr)",
        "return tl.load(ptr, volatile=True)",
        "read = tl.load",
        "return triton.language.load(ptr)",
        "return ptr.load([0])",
        "from triton.language import load as peek",
        "return assembly('ld.b64 $0, [$1];', '=l,l', (ptr,), tl.int64)",
        "read = assembly",
        "return target.assembly('ld.b64 $0, [$1];', '=l,l', (ptr,), tl.int64)",
    ],
)
def test_a_planted_load_is_found(body: str) -> None:
    source = f"@triton.jit\ndef steal(ptr):\n    {body}\n"
    assert list(plain_loads(source, "planted")) == [("planted.steal", 3)]


def test_an_atomic_is_no_plain_load() -> None:
    source = "def look(ptr, lane):\n    return tl.gather(atomic_load(ptr), lane, 0)\n"
    assert list(plain_loads(source, "planted")) == []
