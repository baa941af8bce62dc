"""Documents: links lead somewhere, code names documents that exist, and the words are plain."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md"))
    if not {".git", ".venv", "node_modules"} & set(path.relative_to(ROOT).parts)
)
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCUMENTS}

# They use "promise" as a term, and so may the device code.
ABOUT_THE_HEAP = {
    "docs/design/heap.md",
    "docs/design/memory-order.md",
    "docs/interleaving.md",
    "docs/performance.md",
    "kernels/README.md",
}
GENERATED = {"docs/reference.md", "docs/mechanisms.md", "benchmarks/results/README.md"}

IDIOMS = (
    r"\bwhoever\b",
    r"\b(?:no|some|any|every)body\b",
    r"\bin hand\b",
    r"\bat hand\b",
    r"\bin the way of\b",
    r"\bwaited for\b",
    r"\bwhat lives\b",
    r"\b(?:nothing|none|allocation|block|heap|something) lives\b",
    r"\b(?:blocks that|which blocks) live\b",
    r"\blives (?:in|on|at|by|there)\b",
    r"\blived\b",
    r"\bwhatever needs\b",
    r"\bsentence\b",
    r"\bfor ?ever\b",
    r"\bpromis",
    r"\bno stripe's\b",
    r"\bowns what was not\b",
    r"\bpark(?:s|ed|ing)\b",
    r"\bis due to the program\b",
    r"\bnot marked as not\b",
    r"\bwithout a word\b",
    r"\bhas the words\b",
    r"\bmapped nowhere\b",
    r"\bleads? nowhere\b",
    r"\bfor want of\b",
    r"\bcan be had\b",
    r"\bt(?:ell|ells|old) (?:\w+ ){0,5}apart\b",
    r"\bbeg[ia]ns? anew\b",
    r"\bmidst\b",
    r"\bamid\b",
    r"\bforsaken\b",
)
"""Of the way in which this project was written before; see "plain English" in CONTRIBUTING."""

FOLDERS = ("devalloc", "kernels", "benchmarks", "examples", "tests")
EXEMPT = (
    "tests/interleaving/",
    "tests/documents/test_documents.py",  # it has the list
)


def idioms(text: str) -> list[str]:
    """The patterns of `IDIOMS` that occur in a text."""
    text = " ".join(text.lower().split())
    return [idiom for idiom in IDIOMS if re.search(idiom, text)]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment, docstring and string literal of a Python module.

    Comments in successive lines are one text, and so are the parts of an f-string.
    """
    first = last = 0
    comment = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != last + 1:
                yield first, comment
                comment = ""
            first = first if comment else token.start[0]
            last = token.start[0]
            comment += token.string.lstrip("#")
    if comment:
        yield first, comment
    inside: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part for part in node.values if isinstance(part, ast.Constant)]
            inside.update(map(id, parts))
            yield node.lineno, "{}".join(str(part.value) for part in parts)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield node.lineno, node.value


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
    """Relative links of a document whose target does not exist."""
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


def terms(name: str) -> set[str]:
    """The idioms that are terms in a file."""
    return {r"\bpromis"} if name in ABOUT_THE_HEAP or name.startswith("kernels/") else set()


@pytest.mark.parametrize("name", [name for name in TEXTS if name not in GENERATED])
def test_the_words_are_plain(name: str) -> None:
    assert set(idioms(TEXTS[name])) <= terms(name)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_words_of_code_are_plain(folder: str) -> None:
    wrong: list[str] = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(EXEMPT):
            for line, text in prose(path.read_text()):
                found = set(idioms(text)) - terms(name)
                wrong += (f"{name}:{line}: {idiom}" for idiom in sorted(found))
    assert wrong == []


def test_an_idiom_in_code_is_found() -> None:
    source = '''
"""Whoever gets an address may free it."""
nobody = f"{1} is waited " f"for"  # it may wait for
# ever
'''
    found = [(line, idiom) for line, text in prose(source) for idiom in idioms(text)]
    assert found == [
        (3, r"\bfor ?ever\b"),
        (2, r"\bwhoever\b"),
        (3, r"\bwaited for\b"),
    ]


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
