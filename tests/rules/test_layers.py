"""Imports point downwards only.

The tables below list the layers from the bottom up. A module may import modules of the layers
below its own, and nothing else of this project. An entry covers the module or package of that
name with all it contains, but modules that have an entry of their own; inside one package the only
rule is that imports form no circle.

All imports count: at the top of a module, inside functions, and those for types only. An import is
one of the module that the statement names: ``from devalloc.arena.block import Block`` is one of
`devalloc.arena.block`, and not of the packages around it, whose ``__init__`` merely passes names
on. Who imports from such a package itself imports its ``__init__``, and so all that this imports.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The device code, relative to devalloc.kernels.
KERNEL_LAYERS = [
    {"target"},
    {"bits"},
    {"lanes"},
    {"atomics"},
    {"layout"},
    {"error_record", "debug.block_table", "growing"},
    {"payload", "groups"},
    {"pages", "live", "debug.guards"},
    {"lines", "addresses"},
    {"magazines"},
    {"search"},
    {"allocation", "freeing"},
    {"debug.guarded_calls", "debug.pointers"},
    {"api"},
    {"upkeep", "debug.debug_upkeep"},
    {"__init__", "debug"},
]

# The host code, relative to devalloc. "__init__" is the package's root and what it exports.
HOST_LAYERS = [
    {"errors", "_locate_kernels"},
    {"sizes"},
    {"common", "kernels", "_benchmarks"},
    {"sources", "testing"},
    {"heap", "arena.store"},
    {"arena.policies"},
    {"arena.cache"},
    {"arena.block", "arena.options", "arena.regions", "arena.tensors"},
    {"interop"},
    {"arena"},
    {"cache"},
    {"__init__"},
    {"replay", "report", "distributed", "interop.cupy", "interop.memory_saver"},
    {"demo"},
    {"cli"},
    {"__main__"},
]

DEVICE = "devalloc.kernels"

# What device code may import from outside the project ("time": the interpreter's clock; "inspect":
# for help()).
DEVICE_IMPORTS = {"__future__", "triton", "time", "inspect"}


def sources() -> dict[str, Path]:
    """Return every module of the project, as importable when installed, with its file."""
    found = {}
    for folder, package in (("devalloc", "devalloc"), ("kernels", "devalloc.kernels")):
        for path in sorted((ROOT / folder).glob("**/*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imports(source: str, module: str, is_package: bool, modules: set[str]) -> Iterator[str]:
    """Yield the modules that `source` names in its imports, wherever they stand."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) + 1 - node.level]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in modules else base


def layer_of(module: str, from_host: bool) -> tuple[str, int] | None:
    """Return the entry that covers a module and its height, or None if the tables lack it.

    To the host code the device code is one entry; to itself it has layers of its own.
    """
    package, layers = ("devalloc", HOST_LAYERS) if from_host else (DEVICE, KERNEL_LAYERS)
    path = module.removeprefix(package).lstrip(".")
    names = path.split(".") if path else ["__init__"]
    for name in (".".join(names[:end]) for end in range(len(names), 0, -1)):
        for height, layer in enumerate(layers):
            if name in layer:
                return name, height
    return None


def violation(importer: str, imported: str) -> str | None:
    """Return what is wrong with one import, or None."""
    device = importer.startswith(DEVICE)
    if imported.partition(".")[0] != "devalloc":
        foreign = device and imported.partition(".")[0] not in DEVICE_IMPORTS
        return f"device code {importer} imports {imported}" if foreign else None
    if device and not imported.startswith(DEVICE):
        return f"device code {importer} imports the host's {imported}"
    own = layer_of(importer, from_host=not device)
    target = layer_of(imported, from_host=not device)
    if own is None or target is None:
        return f"{importer if own is None else imported} is in no layer"
    if own[0] == target[0] or target[1] < own[1]:
        return None
    return f"{importer} imports {imported}, which is not below it"


def graph() -> dict[str, set[str]]:
    found = sources()
    return {
        module: set(imports(path.read_text(), module, path.name == "__init__.py", set(found)))
        for module, path in found.items()
    }


def test_imports_point_downwards() -> None:
    wrong = [
        message
        for importer, imported in graph().items()
        for message in (violation(importer, name) for name in sorted(imported))
        if message
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_in_a_layer() -> None:
    unknown = [
        module
        for module in sources()
        if layer_of(module, from_host=not module.startswith(DEVICE)) is None
    ]
    assert not unknown, f"add to the tables of {Path(__file__).name}: {unknown}"


def circles(modules: dict[str, set[str]]) -> list[list[str]]:
    """The groups of several modules in which each imports every other one, through others too."""
    reached: dict[str, set[str]] = {}
    for module in modules:
        found, ahead = set[str](), [module]
        while ahead:
            new = (modules.get(ahead.pop(), set()) & set(modules)) - found
            found |= new
            ahead += new
        reached[module] = found
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in modules
    }
    return sorted(sorted(group) for group in groups if len(group) > 1)


def test_imports_form_no_circle() -> None:
    assert circles(graph()) == []


def test_a_planted_circle_is_found() -> None:
    modules = {"a": {"b", "torch"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"e"}}
    assert circles(modules) == [["a", "b", "c"]]


def constants_of_modules(source: str) -> list[str]:
    """Constants that device code reaches through a module, as in ``layout.KEPT``."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr.isupper()
    ]


def test_constants_are_imported_by_name() -> None:
    """The key of Triton's cache has the functions and the named constants that a kernel uses, but
    no constants of modules: if one changed, the old code would run."""
    kernels = (path for module, path in sources().items() if module.startswith(DEVICE))
    found = {path.name: constants_of_modules(path.read_text()) for path in kernels}
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_a_planted_constant_of_a_module_is_found() -> None:
    source = "def kernel(word):\n    return layout.page_out(word) + layout.KEPT\n"
    assert constants_of_modules(source) == ["layout.KEPT"]


# Of a module and another module's folder: public names, which cannot be other ones.
SHARED_NAMES = {"cache", "policies"}


def shared_names(files: list[Path]) -> list[str]:
    """Names that modules of different folders have in common, or a module and another's folder."""
    places: dict[str, set[Path]] = {}
    for path in files:
        inside = path.parent if path.name != "__init__.py" else path.parent.parent
        name = path.stem if path.name != "__init__.py" else path.parent.name
        places.setdefault(name, set()).add(inside)
    return sorted(
        name
        for name, folders in places.items()
        if len([folder for folder in folders if folder.name != name]) > 1
    )


def test_no_two_modules_have_one_name() -> None:
    files = [path.relative_to(ROOT) for path in sources().values()]
    assert shared_names(files) == sorted(SHARED_NAMES)
    names = Counter(path.name for path in files if not path.name.startswith("__"))
    assert [name for name, times in names.items() if times > 1] == []


def test_a_shared_name_is_found() -> None:
    files = ["a/heap.py", "b/heap.py", "a/arena/arena.py", "a/arena/__init__.py", "c/__init__.py"]
    assert shared_names([Path(file) for file in files]) == ["heap"]


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("devalloc.kernels.bits", "from devalloc.kernels.allocation import malloc_any"),
        ("devalloc.kernels.bits", "from . import search"),
        ("devalloc.kernels.layout", "import torch"),
        ("devalloc.kernels.freeing", "from devalloc.errors import OutOfMemory"),
        ("devalloc.sources.host", "from ..heap import Heap"),
        ("devalloc.sources.host", "if TYPE_CHECKING:\n    from devalloc.heap import Heap"),
        ("devalloc.arena.store.store", "from devalloc.arena.policies.policy import Policy"),
        ("devalloc.errors", "def late():\n    import devalloc"),
        ("devalloc.heap.state", "from devalloc import report"),
        ("devalloc.nowhere", "from devalloc import errors"),
    ],
)
def test_a_planted_import_is_found(importer: str, statement: str) -> None:
    known = {*sources(), "devalloc.report", "devalloc.kernels.search", "devalloc.heap"}
    assert any(violation(importer, name) for name in imports(statement, importer, False, known))


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("devalloc.kernels.freeing", "import triton.language as tl\nfrom . import bits, search"),
        ("devalloc.heap", "import devalloc.kernels.upkeep, torch\nfrom .sources import host"),
        ("devalloc.sources.host", "from devalloc.sources.source import Source"),
        ("devalloc.demo.graph", "from devalloc import Heap"),
    ],
)
def test_a_downward_import_is_let_pass(importer: str, statement: str) -> None:
    known = {
        *sources(),
        "devalloc.sources.host",
        "devalloc.kernels.bits",
        "devalloc.kernels.search",
    }
    names = list(imports(statement, importer, False, known))
    assert [violation(importer, name) for name in names] == [None] * len(names)
