"""Reading PTX for accesses to shared memory that no barrier separates, where functions call others.

Triton puts barriers between what one warp reads of shared memory and what another writes there
next. Across a call it has to know what the other function does, and not every version of it does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

COMMENT = re.compile(r"//[^\n]*")
# A declaration has no body and ends with a semicolon.
PTX_FUNCTION = re.compile(
    r"^(?:\.visible |\.weak )?\.(?P<kind>func|entry)\b(?P<head>[^;{]*)^\{(?P<body>.*?)^\}",
    re.M | re.S,
)
EVENT = re.compile(
    r"(?P<barrier>\b(?:bar|barrier)\.(?:cta\.)?sync)|(?P<write>\b(?:st|atom|red)\.shared)"
    r"|(?P<read>\bld\.shared)|\bcall(?:\.uni)?\b[^;]*?(?P<call>[\w$]+)\s*,\s*\([^;]*;"
)
NAME = re.compile(r"([\w$]+)\s*\(")

Event = tuple[str, str]
"""What happens ("barrier", "read", "write" or "call"), and who is called."""


def functions_of(ptx: str) -> dict[str, list[Event]]:
    """What the functions of a module do, by name, in the order of the text."""
    found = {}
    for function in PTX_FUNCTION.finditer(COMMENT.sub("", ptx)):
        name = NAME.findall(function["head"])[-1]
        found[name] = [
            (event.lastgroup or "", event["call"] or "")
            for event in EVENT.finditer(function["body"])
        ]
    return found


def races(ptx: str) -> list[str]:
    """Return the calls at which warps of one program may race for shared memory.

    "a -> b": a reads, and b writes before it comes to a barrier; "a <- b": b reads at its end, and
    a writes, or calls a function that does, before it comes to a barrier. Branches are not
    followed: what stands between two accesses in the text is taken to be executed between them.
    """
    functions = functions_of(ptx)

    def accesses(events: list[Event], backwards: bool = False) -> Iterator[str]:
        """The accesses up to the first barrier, or from the end back to the last one."""
        for kind, callee in reversed(events) if backwards else events:
            if kind == "call":
                inner = functions.get(callee, [])
                yield from accesses(inner, backwards)
                if ("barrier", "") in inner:
                    return
            elif kind == "barrier":
                return
            else:
                yield kind

    found = []
    for name, events in functions.items():
        for at, (kind, callee) in enumerate(events):
            if kind != "call":
                continue
            inner = functions.get(callee, [])
            if "read" in accesses(events[:at], backwards=True) and "write" in accesses(inner):
                found.append(f"{name} -> {callee}")
            if "read" in accesses(inner, backwards=True) and "write" in accesses(events[at + 1 :]):
                found.append(f"{name} <- {callee}")
    return found
