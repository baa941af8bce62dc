"""Reading PTX for accesses to shared memory that no barrier separates, where functions call others.

Triton puts barriers between what one warp reads of shared memory and what another writes there
next. Across a call it has to know what the other function does, and not every version of it does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

COMMENT = re.compile(r"//[^\n]*")
# A declaration has no body and ends with a semicolon.
PTX_FUNCTION = re.compile(
    r"^(?:\.visible |\.weak )?\.(?P<kind>func|entry)\b(?P<head>[^;{]*)^\{(?P<body>.*?)^\}",
    re.M | re.S,
)
NAME = re.compile(r"([\w$]+)\s*\(")
STEP = re.compile(
    r"(?P<barrier>\b(?:bar|barrier)\.(?:cta\.)?sync)|(?P<write>\b(?:st|atom|red)\.shared)"
    r"|(?P<read>\bld\.shared)|\bcall(?:\.uni)?\b[^;]*?(?P<call>[\w$]+)\s*,\s*\([^;]*;"
    r"|^(?P<label>[\w$]+):|(?P<guard>@!?%p\d+\s+)?\b(?:bra(?:\.uni)?\s+(?P<target>[\w$]+)"
    r"|(?P<end>ret|exit|trap))\s*;",
    re.M,
)
OWN = ""


@dataclass
class Function:
    """What a function does, step by step, and where it goes on from each step.

    Attributes
    ----------
    steps : list of (str, str)
        "barrier", "write", "read" or "call", and who is called; "" where control only meets.
    following : list of list of int
    """

    steps: list[tuple[str, str]] = field(default_factory=list)
    following: list[list[int]] = field(default_factory=list)


def functions_of(ptx: str) -> dict[str, Function]:
    """The functions of a module, by name."""
    found = {}
    for text in PTX_FUNCTION.finditer(COMMENT.sub("", ptx)):
        function = Function()
        labels: dict[str, int] = {}
        jumps: dict[int, str] = {}
        for at, step in enumerate(STEP.finditer(text["body"])):
            onwards = [at + 1]
            kind = step.lastgroup or ""
            if step["label"]:
                labels[step["label"]] = at
            elif step["target"] or step["end"]:
                onwards = onwards if step["guard"] else []
                if step["target"]:
                    jumps[at] = step["target"]
            memory = kind in ("barrier", "write", "read", "call")
            function.steps.append((kind, step["call"] or "") if memory else ("", ""))
            function.following.append(onwards)
        for at, target in jumps.items():
            function.following[at].append(labels[target])
        function.steps.append(("", ""))  # the end of the text
        function.following.append([])
        found[NAME.findall(text["head"])[-1]] = function
    return found


@dataclass(frozen=True)
class Effect:
    """What may happen in a call: it writes before it comes to a barrier, it comes to none, it ends
    with something read since its last one."""

    writes: bool
    passes: bool
    reads: bool


class Reading:
    """The functions of a module, and the races that were found."""

    def __init__(self, ptx: str) -> None:
        self.functions = functions_of(ptx)
        self.races: set[str] = set()
        self._effects: dict[str, Effect] = {}

    def effect(self, name: str) -> Effect:
        """Follow every path of a function; note the races at its calls."""
        if name not in self._effects:
            # (A function without code cannot be followed: a KeyError.)
            self._effects[name] = self._follow(name, self.functions[name])
        return self._effects[name]

    def _follow(self, name: str, function: Function) -> Effect:
        # Per step, who may have read since the last barrier (OWN, or whom the function called), and
        # whether there may have been no barrier yet.
        writes = passes = reads = False
        seen: dict[int, tuple[frozenset[str], bool]] = {}
        work = [(0, frozenset[str](), True)]
        while work:
            at, readers, fresh = work.pop()
            known = seen.get(at)
            if known is not None:
                if readers <= known[0] and fresh <= known[1]:
                    continue
                readers, fresh = readers | known[0], fresh or known[1]
            seen[at] = readers, fresh
            kind, callee = function.steps[at]
            if kind == "barrier":
                readers, fresh = frozenset(), False
            elif kind == "read":
                readers |= {OWN}
            elif kind == "write":
                writes |= fresh
                self.races |= {f"{name} <- {reader}" for reader in readers if reader != OWN}
            elif kind == "call":
                effect = self.effect(callee)
                if effect.writes:
                    writes |= fresh
                    self.races |= {
                        f"{name} <- {reader}" if reader != OWN else f"{name} -> {callee}"
                        for reader in readers
                    }
                if not effect.passes:
                    readers, fresh = frozenset(), False
                if effect.reads:
                    readers |= {callee}
            if not function.following[at]:
                passes |= fresh
                reads |= bool(readers)
            work += [(onwards, readers, fresh) for onwards in function.following[at]]
        return Effect(writes, passes, reads)


def races(ptx: str) -> list[str]:
    """Return the calls at which warps of one program may race for shared memory.

    "a -> b": a reads, and b writes before it comes to a barrier; "a <- b": b reads at its end, and
    a writes, or calls a function that does, before it comes to a barrier.
    """
    reading = Reading(ptx)
    for name in reading.functions:
        reading.effect(name)
    return sorted(reading.races)
