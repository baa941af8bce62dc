"""Files of every kind that devalloc reads, damaged at random: read, or refused by name.

Bytes are changed, cut out and repeated, in the file itself and in what is packed in it, files end
early, and values are such as no program writes. No other error than `InvalidArgument` may follow.
"""

from __future__ import annotations

import copy
import gzip
import io
import pickle
import pickletools
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devalloc.demo.graph import read_graph
from devalloc.errors import InvalidArgument
from devalloc.replay.files import load_trace
from devalloc.report.snapshot_file import FORMAT, load_snapshot
from tests.replay.torch_like import a_snapshot

ROUNDS = 400


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """One to three times something is changed, left out or repeated, or the end is missing."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        end = at + rng.choice((1, 1, 2, 8, 40))
        how = rng.randrange(6)
        if how < 3:
            data[at:end] = rng.randbytes(len(data[at:end]))
        elif how == 3:
            del data[at:end]
        elif how == 4:
            data[at:at] = data[at:end]
        else:
            del data[at:]
    return bytes(data)


def damaged_cells(text: str, rng: random.Random) -> bytes:
    """One cell of the table is odd, or its bytes are damaged."""
    if rng.randrange(2):
        return damaged(text.encode(), rng)
    lines = [line.split(",") for line in text.splitlines()]
    cells = rng.choice(lines)
    cells[rng.randrange(len(cells))] = rng.choice(ODD_CELLS)
    return "\n".join(",".join(cells) for cells in lines).encode()


def damaged_tree(value: Any, rng: random.Random) -> Any:
    """A copy of dicts and lists in which one thing is odd, or one key is missing."""
    if not isinstance(value, dict | list) or not value or rng.randrange(12) == 0:
        return rng.choice(ODD_VALUES)
    value = copy.copy(value)
    at = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if rng.randrange(8) == 0:
        del value[at]
    else:
        value[at] = damaged_tree(value[at], rng)
    return value


def perhaps_packed(data: bytes, rng: random.Random) -> bytes:
    """As it is, or gzip'ed, or gzip'ed and then damaged."""
    how = rng.randrange(4)
    if how < 2:
        return data
    packed = gzip.compress(data, mtime=0)
    return packed if how == 2 else damaged(packed, rng)


# The kinds of files ---------------------------------------------------------------------------

NINES = "9" * 5000  # more digits than Python turns into a number
ODD_CELLS = ["", "-1", "0", "1e999", "inf", "x", "ü", "(nil)", NINES[:400], NINES, '"', "\0"]
ODD_JSON = ["null", "-1", "1.5", "Infinity", "NaN", '"x"', '"5"', "[]", "{}", NINES, "[" * 50_000]
INFINITE, NO_NUMBER = float("inf"), float("nan")
ODD_VALUES = [None, -1, 0, 1.5, "x", [], {}, INFINITE, NO_NUMBER, 10**400, 10**5000]
ODD_ARRAYS = [-1, 0, 1.5, "x", [], [[]], INFINITE, NO_NUMBER, 1 << 62, np.zeros(4, dtype="V8")]

LOG = "Thread,Time,Action,Pointer,Size,Stream\n" + "".join(
    f"1,14:21:19,{action},0x{address:x},{size},0x{stream:x}\n"
    for address, size, stream in [(16, 512, 0), (32, 64, 2), (16, 99, 0), (48, 1, 0)]
    for action in ("allocate", "free failure", "free", "allocate failure")
)
HEADER = {
    "origin": '{"program": "a"}',
    "live_at_start": "1",
    "reserved_at_start": "2",
    "peak_reserved": "10",
    "notes": '["one"]',
}
ROWS = "action,block,size,stream\na,0,4,0\ns,,8,\na,1,4,0\nf,0,,\na,2,77,1\n"
EDGES = "# from, to, weight\n" + "".join(f"{n},{n * 7 % 5},0.5\n" for n in range(20))


def a_log(rng: random.Random) -> bytes:
    return perhaps_packed(damaged_cells(LOG, rng), rng)


def a_compact_trace(rng: random.Random) -> bytes:
    header, rows = dict(HEADER), ROWS.encode()
    if rng.randrange(2):
        header[rng.choice(list(header))] = rng.choice(ODD_JSON)
    else:
        rows = damaged_cells(ROWS, rng)
    fields = ", ".join(f'"{key}": {value}' for key, value in header.items())
    data = f"# devalloc trace 1\n{{{fields}}}\n".encode() + rows
    return perhaps_packed(damaged(data, rng) if rng.randrange(3) == 0 else data, rng)


def a_pickle(rng: random.Random) -> bytes:
    snapshot = {key: a_snapshot()[key] for key in ("device_traces", "segments")}
    if rng.randrange(3):
        data = pickle.dumps(damaged_tree(snapshot, rng), protocol=4)
    else:
        data = damaged(pickle.dumps(snapshot, protocol=4), rng)
    return perhaps_packed(b"" if asks_for_memory(data) else data, rng)


def asks_for_memory(data: bytes) -> bool:
    """Whether a pickle requests a place so far back in its memo that Python would fill
    gigabytes."""
    try:
        return any(
            "PUT" in opcode.name and argument > 1 << 20
            for opcode, argument, _ in pickletools.genops(data)
        )
    except Exception:  # it ends here for the unpickler too
        return False


def a_heap_snapshot(rng: random.Random) -> bytes:
    fields: dict[str, Any] = {
        "format": FORMAT,
        "capacity": 4 << 16,
        "page_bytes": 1 << 16,
        "class_sizes": (16, 32),
        "page_kind": np.array([0, 1, 2, 2], dtype=np.uint8),
        "page_class": np.array([-1, 1, -1, -1], dtype=np.int16),
        "page_live": np.array([0, 5, 0, 0], dtype=np.int32),
        "page_slots": np.array([0, 9, 0, 0], dtype=np.int32),
        "run_pages": np.array([0, 0, 2, 0], dtype=np.int32),
        "device": "cpu",
    }
    how, name = rng.randrange(3), rng.choice(list(fields))
    if how == 0:
        fields[name] = rng.choice([*ODD_ARRAYS, *fields.values()])
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for field, value in fields.items():
            array = io.BytesIO()
            np.save(array, np.asarray(value), allow_pickle=False)
            data = array.getvalue()
            if how == 1 and field == name:  # with a checksum that fits
                data = damaged(data, rng)
            archive.writestr(zipfile.ZipInfo(f"{field}.npy"), data, zipfile.ZIP_DEFLATED)
    return damaged(file.getvalue(), rng) if how == 2 else file.getvalue()


def a_graph(rng: random.Random) -> bytes:
    return perhaps_packed(damaged_cells(EDGES, rng), rng)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::SyntaxWarning")
@pytest.mark.parametrize(
    ("make", "read"),
    [
        (a_log, load_trace),
        (a_compact_trace, load_trace),
        (a_pickle, load_trace),
        (a_heap_snapshot, load_snapshot),
        (a_graph, read_graph),
    ],
    ids=lambda function: function.__name__,
)
def test_damaged_files(
    tmp_path: Path, make: Callable[[random.Random], bytes], read: Callable[[Path], object]
) -> None:
    rng = random.Random(make.__name__)
    path = tmp_path / "damaged"
    wrong: dict[str, str] = {}
    refused = 0
    for number in range(ROUNDS):
        path.write_bytes(make(rng))
        try:
            read(path)
        except InvalidArgument as error:
            refused += 1
            if path.name not in str(error):
                wrong.setdefault("unnamed", f"in round {number}: {error}")
        except Exception as error:
            wrong.setdefault(type(error).__name__, f"in round {number}: {str(error)[:100]}")
    assert not wrong
    assert refused > ROUNDS // 4, "the damage has an effect"
