"""Documents: links lead somewhere, code names documents that exist, and the words are plain."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md"))
    if not {".git", ".venv", "node_modules"} & set(path.relative_to(ROOT).parts)
)
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCUMENTS}

# They are rewritten together with the heap that comes next.
OLD_HEAP = {
    "docs/compact-heap.md",
    "docs/design.md",
    "docs/interleaving.md",
    "docs/memory-order.md",
    "docs/performance.md",
    "kernels/README.md",
}
GENERATED = {"docs/reference.md", "docs/mechanisms.md", "benchmarks/results/README.md"}

IDIOMS = (
    r"\bwhoever\b",
    r"\bin hand for a moment\b",
    r"\bwaited for\b",
    r"\bwhat lives in it\b",
    r"\brefused with a sentence\b",
    r"\bmay wait for ever\b",
    r"\bnobody may write\b",
    r"\bno stripe's\b",
    r"\bowns what was not\b",
    r"\bstays parked\b",
    r"\bis due to the program\b",
    r"\bnot marked as not\b",
    r"\bwithout a word\b",
)
"""Of the way in which documents were written before; see "plain English" in CONTRIBUTING."""


def anchors(text: str) -> set[str]:
    """What a link into a document may name: its headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().strip()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


def broken_links(name: str, text: str) -> list[str]:
    """Relative links of a document that lead nowhere."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        if not path.exists():
            wrong.append(f"{name}: {target}")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text()):
            wrong.append(f"{name}: {target} (no such heading)")
    return wrong


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    assert broken_links(name, TEXTS[name]) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](README.md) [b](nowhere.md) [c](README.md#nothing) `[d](x.md)` [e](https://x.org)"
    assert broken_links("NEW.md", text) == [
        "NEW.md: nowhere.md",
        "NEW.md: README.md#nothing (no such heading)",
    ]


@pytest.mark.parametrize("folder", ["devalloc", "kernels", "benchmarks", "tests", "examples"])
def test_documents_that_code_names_exist(folder: str) -> None:
    wrong: list[str] = []
    for path in (ROOT / folder).rglob("*.py"):
        for named in re.findall(r"docs/[\w/-]+\.(?:md|py)", path.read_text()):
            if not (ROOT / named).exists():
                wrong.append(f"{path.relative_to(ROOT)}: {named}")
    assert wrong == []


@pytest.mark.parametrize("name", [name for name in TEXTS if name not in OLD_HEAP | GENERATED])
def test_the_words_are_plain(name: str) -> None:
    text = " ".join(TEXTS[name].lower().split())
    assert [idiom for idiom in IDIOMS if re.search(idiom, text)] == []


def test_every_guide_is_in_the_index() -> None:
    guides = {path for path in TEXTS if path.startswith(("docs/guide/", "docs/design/"))}
    index = TEXTS["docs/index.md"]
    assert [path for path in guides if f"({path.removeprefix('docs/')})" not in index] == []


def test_the_snippet_of_the_readme_runs(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```", TEXTS["README.md"], re.MULTILINE | re.DOTALL)
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "100" in done.stdout


def test_bugs_that_no_release_had_are_not_in_the_changelog() -> None:
    """A reader of the first version has not met them."""
    unreleased = re.split(r"^## ", TEXTS["CHANGELOG.md"], flags=re.MULTILINE)[1]
    assert "First version." not in unreleased or "Fixed" not in unreleased


def test_the_readme_fits_on_three_screens() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 110
