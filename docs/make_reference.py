"""Make docs/reference.md from the docstrings of everything that is public.

python docs/make_reference.py            # write it
python docs/make_reference.py --check    # exit with 1 if it is not current
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "reference.md"
WIDTH = 92

# Title, module, and names; no names: what the module exports.
SECTIONS: list[tuple[str, str, tuple[str, ...]]] = [
    ("In kernels", "devalloc.kernels", ()),
    ("Heaps", "devalloc", ("Heap", "Stats", "Snapshot", "launcher")),
    ("Errors of a heap", "devalloc.heap.recorded_errors", ("Fault",)),
    ("Leaks of a debug heap", "devalloc.heap.leaks", ("LeakReport", "TagLeaks", "LiveBlock")),
    ("Pictures of heaps", "devalloc.report", ()),
    ("Arenas", "devalloc", ("Arena", "Block")),
    (
        "Policies of arenas",
        "devalloc.cache",
        ("FrugalPolicy", "TorchPolicy", "BfcPolicy", "AutoGrowthPolicy", "TinyPolicy", "Policy"),
    ),
    ("The cache of an arena", "devalloc.cache", ("Cache", "PrivatePool")),
    ("Regions on all ranks", "devalloc.distributed", ("pause", "resume")),
    ("The names of torch_memory_saver", "devalloc.interop.memory_saver", ("MemorySaver",)),
    ("CuPy", "devalloc.interop.cupy", ("allocator",)),
    ("Sources", "devalloc.sources", ()),
    ("Adaptors", "devalloc.sources.adaptors", ()),
    ("Traces", "devalloc.replay.files", ("load_trace", "save_compact")),
    ("Replaying", "devalloc.replay.policies", ("replay_policies",)),
    ("Testing kernels", "devalloc.testing", ()),
    ("Errors and warnings", "devalloc.errors", ()),
]

PROTOCOLS = {"Source", "Adaptor", "DevallocError", "Policy"}
"""Classes whose methods stand in their own entry, and not in that of each subclass."""

CACHE_MEMBERS = {
    "audit",
    "empty_cache",
    "erase_stream",
    "forget_stream",
    "on_low_memory",
    "record_history",
    "report",
    "route",
    "set_safe_frontier",
}
"""What a user of an arena may need from its cache; the rest belongs to the arena."""


def text_of(doc: str) -> str:
    """A docstring as Markdown: sections in bold, their entries as a list."""
    doc = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", doc).replace("``", "`")
    lines, out = doc.splitlines(), []
    in_entries = False
    for at, line in enumerate(lines):
        following = lines[at + 1] if at + 1 < len(lines) else ""
        if at and (line == "::" or (line and set(line) == {"-"})):
            continue
        if line and following and set(following) == {"-"} and len(following) == len(line):
            in_entries = line in ("Parameters", "Attributes", "Raises", "Returns", "Yields")
            out += [f"**{line}**", ""]
        elif in_entries and line and not line.startswith(" ") and following.startswith("    "):
            name, _, kind = line.partition(" : ")
            out.append(f"- `{name}`" + (f" : {kind}" if kind else ""))
        elif in_entries and line.startswith("    "):
            out.append(f"  {line.strip()}")
        else:
            out.append(line)
    return "\n".join(out).strip()


def signature_of(thing: Any) -> str:
    """Its parameters as one would write them, without what Python adds."""
    try:
        parameters = list(inspect.signature(getattr(thing, "fn", thing)).parameters.values())
    except (TypeError, ValueError):
        return ""
    parts, kind = [], None
    for each in parameters:
        if each.name in ("self", "cls"):
            continue
        keyword = each.kind is each.KEYWORD_ONLY
        if keyword and kind not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            parts.append("*")
        kind = each.kind
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        text = stars + each.name
        if each.annotation is not each.empty:
            text += f": {plain(each.annotation)}"
        if each.default is not each.empty:
            default = re.sub(r"<.* at 0x\w+>", "...", repr(each.default))
            text += f" = {default}" if ":" in text else f"={default}"
        parts.append(text)
    return folded(parts)


def folded(parts: list[str]) -> str:
    """Parameters in brackets, one on a line if they do not fit into one."""
    line = f"({', '.join(parts)})"
    if len(line) <= WIDTH - 30:
        return line
    return "(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def plain(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace("triton.language.core.", "tl.")


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with a docstring: its own as they are defined, then others."""
    seen = set()
    protocols = [base for base in cls.__mro__[1:] if base.__name__ in PROTOCOLS]
    for base in (cls, *reversed(cls.__mro__[1:])):
        if not base.__module__.startswith("devalloc") or base in protocols:
            continue
        for name in vars(base):
            known = name in seen or any(name in vars(protocol) for protocol in protocols)
            wanted = cls.__name__ != "Cache" or name in CACHE_MEMBERS
            if name.startswith("_") or known or not wanted:
                continue
            seen.add(name)
            member = inspect.getattr_static(cls, name)
            if isinstance(member, classmethod | staticmethod):
                member = member.__func__
            function = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function) and function.__doc__:
                yield name, member


def entry(title: str, call: str, thing: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} {title}"
    if call:
        yield f"```python\n{call}\n```"
    doc = own_doc(thing)
    if doc:
        yield text_of(doc)


def own_doc(thing: Any) -> str:
    """Its docstring; nothing for what dataclasses and exceptions write themselves."""
    doc = inspect.getdoc(getattr(thing, "fn", thing)) or ""
    name = getattr(thing, "__name__", "")
    return "" if name and doc.startswith(f"{name}(") else doc


def class_entry(name: str, cls: type) -> Iterator[str]:
    is_error = issubclass(cls, BaseException)
    yield from entry(f"`{name}`", "" if is_error else f"{name}{signature_of(cls)}", cls, 3)
    if is_error:
        bases = (base.__name__ for base in cls.__bases__)
        yield f"A subclass of {', '.join(f'`{base}`' for base in bases)}."
    for member, thing in members(cls):
        if isinstance(thing, property):
            yield from entry(f"`{name}.{member}`", "", thing, 4)
        else:
            yield from entry(f"`{name}.{member}`", f".{member}{signature_of(thing)}", thing, 4)


def command_entries() -> Iterator[str]:
    """The command line, without what needs a checkout."""
    from devalloc.cli import main

    for name in main.commands:
        command = main.commands[name]
        if name == "bench":
            continue
        arguments = [each for each in command.params if isinstance(each, click.Argument)]
        words = " ".join(each.make_metavar(click.Context(command)) for each in arguments)
        yield f"### `devalloc {name}`"
        yield f"    devalloc {name}{' [OPTIONS]' if command.params else ''} {words}".rstrip()
        yield inspect.cleandoc(command.help or "")
        options = [each for each in command.params if isinstance(each, click.Option)]
        lines = [f"- `{', '.join(each.opts)}`: {each.help}" for each in options]
        if lines:
            yield "\n".join(lines)


def parts() -> Iterator[str]:
    yield "# Reference"
    yield (
        "Made from the docstrings by `python docs/make_reference.py`; do not edit it. "
        "In Python, `help(devalloc.Heap)` says the same."
    )
    for title, path, names in SECTIONS:
        module = importlib.import_module(path)
        exported = getattr(module, "__all__", None) or [
            name for name in vars(module) if getattr(vars(module)[name], "__module__", "") == path
        ]
        yield f"## {title}: `{path}`"
        for name in names or exported:
            thing = getattr(module, name)
            if inspect.isclass(thing):
                yield from class_entry(name, thing)
            elif callable(thing):
                yield from entry(f"`{name}`", f"{name}{signature_of(thing)}", thing, 3)
    yield "## Command line"
    yield from command_entries()


def reference() -> str:
    """The whole text."""
    return "\n\n".join(parts()) + "\n"


def main(arguments: list[str]) -> int:
    text = reference()
    if arguments == ["--check"]:
        return 0 if OUTPUT.exists() and OUTPUT.read_text() == text else 1
    OUTPUT.write_text(text)
    print(f"wrote {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
