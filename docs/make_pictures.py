"""Draw the life of a page: docs/plots/page.svg.

python docs/make_pictures.py
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).parent / "plots" / "page.svg"
WIDTH, HEIGHT = 880, 300
BOX = (150, 46)

STATES = {
    "free": (110, 60, "free", "word 0, bit of the free row"),
    "line": (440, 60, "in a line", "slab, KEPT"),
    "slab": (770, 60, "slab", "at most full"),
    "half": (770, 220, "half empty", "bit of the row of its class"),
    "idle": (440, 220, "empty, kept", "nothing out, KEPT"),
    "run": (110, 220, "run", "one large block"),
}

# From, to, words, and where these stand beside the middle of the arrow.
ARROWS = (
    ("free", "line", "open: clear the bit, add", (0, -10)),
    ("line", "slab", "last ticket: clear KEPT", (0, -10)),
    ("slab", "half", "frees: set its bit", (52, 4)),
    ("half", "line", "open: clear its bit", (70, -16)),
    ("line", "idle", "frees", (26, 4)),
    ("idle", "free", "search, trim: retire", (70, -16)),
    ("slab", "free", "last free: retire (swap to 0, set the bit)", (0, -66)),
    ("free", "run", "malloc, free", (46, 4)),
)


def edge(of: str, to: str) -> tuple[float, float]:
    """Where the line from the middle of one box to that of another leaves the first."""
    x, y = STATES[of][:2]
    dx, dy = STATES[to][0] - x, STATES[to][1] - y
    reach = min(
        BOX[0] / 2 / abs(dx) if dx else float("inf"), BOX[1] / 2 / abs(dy) if dy else float("inf")
    )
    return x + dx * reach, y + dy * reach


def arrow(of: str, to: str, words: str, aside: tuple[int, int]) -> str:
    """An arrow with its words; around the box between, where there is one."""
    (x, y), (u, v) = edge(of, to), edge(to, of)
    if abs(STATES[of][0] - STATES[to][0]) > WIDTH / 2 and y == v:
        x, u, y, v = STATES[of][0], STATES[to][0], y - BOX[1] / 2, v - BOX[1] / 2
        path = f"M{x:.0f},{y:.0f} C{x:.0f},{y - 40:.0f} {u:.0f},{v - 40:.0f} {u:.0f},{v:.0f}"
        middle = (x + u) / 2, y - 30 + 66 - 8
    else:
        path = f"M{x:.0f},{y:.0f} L{u:.0f},{v:.0f}"
        middle = (x + u) / 2, (y + v) / 2
    text = f'<text x="{middle[0] + aside[0]:.0f}" y="{middle[1] + aside[1]:.0f}">{words}</text>'
    return f'<path d="{path}" marker-end="url(#head)"/>{text}'


def box(x: int, y: int, name: str, words: str) -> str:
    return (
        f'<rect x="{x - BOX[0] // 2}" y="{y - BOX[1] // 2}" width="{BOX[0]}" height="{BOX[1]}" '
        f'rx="6"/><text class="name" x="{x}" y="{y - 3}">{name}</text>'
        f'<text x="{x}" y="{y + 14}">{words}</text>'
    )


def picture() -> str:
    style = (
        "text{font:11px sans-serif;text-anchor:middle;fill:#333}"
        ".name{font-weight:bold;font-size:13px}"
        "rect{fill:#eef3fa;stroke:#36c}path{fill:none;stroke:#666}#head path{fill:#666}"
    )
    head = (
        '<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z"/></marker>'
    )
    parts = [arrow(*each) for each in ARROWS] + [box(*each) for each in STATES.values()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -30 {WIDTH} {HEIGHT}">'
        f'<rect x="0" y="-30" width="{WIDTH}" height="{HEIGHT}" style="fill:#fff;stroke:none"/>'
        f"<style>{style}</style><defs>{head}</defs>{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
