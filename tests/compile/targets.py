"""Compile one kernel for one target without a GPU, and read what it costs.

Registers, stack and spills are read from the binary itself, with ``cuobjdump`` and ``nvdisasm`` as
shipped with Triton; for AMD from the metadata at the end of the assembly. Atomics are counted in
PTX and AMD assembly, function by function: cold paths are functions of their own (``noinline``),
so the kernel's own body is the fast path, and a loop counts once.

Must run in a process without ``TRITON_INTERPRET``; `tests.compile.measure` starts such processes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib import import_module

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from tests.compile.cases import Case
from tests.compile.shared_memory import NAME, PTX_FUNCTION, races

TARGETS = {
    "cuda80": GPUTarget("cuda", 80, 32),
    "cuda90": GPUTarget("cuda", 90, 32),
    "cuda100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel needs; bytes are per thread, but for `shared_bytes`, per program.

    Attributes
    ----------
    registers : int
        Per thread (AMD: vector registers), the most over the kernel and what it calls.
    spill_bytes : int
        Spilled by the kernel's own body, stores and loads added, each instruction once
        (AMD: spilled registers, wherever).
    cold_spill_bytes : int
        The same for the functions that it calls (AMD: 0).
    stack_bytes : int
        Stack of the kernel (AMD: scratch).
    shared_bytes : int
        Shared memory of one program.
    atomics : dict of str to int
        Atomic instructions on global memory in the kernel's own body, by kind: the fast path.
    cold_atomics : int
        Those in the functions that it calls.
    functions : list of str
        Those functions, without the types of their arguments.
    races : list of str
        Calls at which warps may race for shared memory; AMD: functions with a release for which
        not every wave has waited.
    work : int
        What decides how long it takes to compile: in each function the number of operations, times
        that of accesses to global memory by blocks, all added.
    """

    registers: int
    spill_bytes: int
    cold_spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    atomics: dict[str, int]
    cold_atomics: int
    functions: list[str]
    races: list[str]
    work: int


def compile_case(case: Case, target: str) -> CompiledKernel:
    """Compile as a launch would: pointers are aligned to 16 bytes, integers are not special."""
    kernel = getattr(import_module(case.module), case.name)
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise RuntimeError(f"{case.key}: the kernel is interpreted; unset TRITON_INTERPRET")
    pointers = [i for i, name in enumerate(kernel.arg_names) if case.types.get(name, "")[:1] == "*"]
    signature = {name: case.types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs=dict(case.constexprs),
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    # The kernels ask which target they are compiled for; without a GPU there is no driver to say.
    triton.runtime.driver.set_active(Driver(TARGETS[target]))
    return triton.compile(source, target=TARGETS[target], options={"num_warps": case.warps})


class Driver:
    """As much of a driver as compiling asks for: the target."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target


def usage(case: Case, target: str) -> Usage:
    """Compile `case` for `target` and read its resources."""
    compiled = compile_case(case, target)
    shared = compiled.metadata.shared
    work = work_of(compiled.asm["ttir"])
    if TARGETS[target].backend == "hip":
        return read_amdgcn(compiled.asm["amdgcn"], compiled.metadata.name, shared, work)
    return read_cuda(compiled.asm["ptx"], compiled.asm["cubin"], shared, work)


FUNCTION = re.compile(r"^  tt\.func .*?^  \}", re.M | re.S)
OPERATION = re.compile(r'^ {4,}(?:%\S+ = )?"?(?:[a-z]+\.)', re.M)
ACCESS = re.compile(r"\btt\.(?:load|store|atomic_rmw|atomic_cas) .* : \(?tensor<\S*!tt\.ptr")


def work_of(ttir: str) -> int:
    """Return a kernel's `Usage.work`, from Triton's first form of it.

    Half of the time, or more, goes to one pass: it lays out blocks so that neighbouring threads
    access neighbouring words, and looks for each access at all operations that depend on it, or it
    on them, which are nearly all of the function's. (0.04 s for 1,000 of this on a slow core.)
    """
    functions = FUNCTION.findall(ttir)
    assert len(functions) == ttir.count("tt.func ")
    return sum(len(OPERATION.findall(body)) * len(ACCESS.findall(body)) for body in functions)


# CUDA

PTX_ATOMIC = re.compile(r"\b(?:atom|red)\.(?!shared)\S*?\.(add|and|cas|exch|max|min|or|xor)\b")


SASS_FUNCTION = re.compile(r"^\s*\.type\s+(?P<name>\S+),@function$", re.M)
SASS_SPILL = re.compile(r"\b(?:STL|LDL)(?:\.(?!64|128)\w+)*(?:\.(?P<bits>64|128))?\b")


def read_cuda(ptx: str, cubin: bytes, shared: int, work: int) -> Usage:
    hot: Counter[str] = Counter()
    cold: Counter[str] = Counter()
    called = set()
    for function in PTX_FUNCTION.finditer(ptx):
        counts = hot if function["kind"] == "entry" else cold
        counts.update(PTX_ATOMIC.findall(function["body"]))
        if function["kind"] != "entry":
            called.add(without_types(NAME.findall(function["head"])[-1]))
    assert sum(hot.values()) + sum(cold.values()) == len(PTX_ATOMIC.findall(ptx))
    resources = run_tool(knobs.nvidia.cuobjdump.path, cubin, "-res-usage")
    (row,) = re.findall(r"REG:(\d+) STACK:(\d+)", resources)
    # (-c: code only; -ndf: no analysis of branches, which would only take its time.)
    sass = run_tool(knobs.nvidia.nvdisasm.path, cubin, "-c", "-ndf")
    spill, cold_spill = spilled_bytes(sass)
    return Usage(
        registers=int(row[0]),
        spill_bytes=spill,
        cold_spill_bytes=cold_spill,
        stack_bytes=int(row[1]),
        shared_bytes=shared,
        atomics=dict(sorted(hot.items())),
        cold_atomics=sum(cold.values()),
        functions=sorted(called),
        races=races(ptx),
        work=work,
    )


def spilled_bytes(sass: str) -> tuple[int, int]:
    """Return the bytes that go to and from local memory: in the kernel's body, and elsewhere.

    Triton puts nothing else into local memory: every such access is a spill.
    """
    marks = [*SASS_FUNCTION.finditer(sass)]
    ends = [mark.start() for mark in marks[1:]] + [len(sass)]
    hot = cold = 0
    for mark, end in zip(marks, ends, strict=True):
        accesses = SASS_SPILL.finditer(sass, mark.end(), end)
        moved = sum(int(access["bits"] or 32) // 8 for access in accesses)
        if mark["name"].startswith("$"):  # what the kernel calls: "$kernel$function"
            cold += moved
        else:
            hot += moved
    return hot, cold


def without_types(name: str) -> str:
    """What Triton calls a function (dots become "_$_" in PTX), without its arguments' types."""
    return name.replace("_$_", ".").partition("__")[0]


def run_tool(path: str, cubin: bytes, *options: str) -> str:
    """Run a CUDA tool of the Triton package on a binary; return what it printed."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, *options, file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{path} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


# AMD

AMD_FUNCTION = re.compile(
    r'^"?(?P<name>[\w.$(),]+)"?:\s*; @"?(?P=name)"?$(?P<body>.*?)^\.Lfunc_end\d+:', re.M | re.S
)
AMD_ATOMIC = re.compile(r"^\s+(?:buffer|flat|global)_atomic_([a-z]+)", re.M)
AMD_STEP = re.compile(
    r"^\s+(?:(?P<wait>s_waitcnt .*vmcnt\(0\))|(?P<barrier>s_barrier)|(?P<release>buffer_wbl2)"
    r"|(?P<access>(?:buffer_(?!inv)|flat|global|scratch)_)(?P<swap>atomic_cmpswap)?)",
    re.M,
)
AMD_KIND = {"cmpswap": "cas", "swap": "exch", "smax": "max", "smin": "min"}


def read_amdgcn(assembly: str, kernel: str, shared: int, work: int) -> Usage:
    hot: Counter[str] = Counter()
    cold: Counter[str] = Counter()
    called = set()
    for function in AMD_FUNCTION.finditer(assembly):
        counts = hot if function["name"] == kernel else cold
        counts.update(AMD_KIND.get(kind, kind) for kind in AMD_ATOMIC.findall(function["body"]))
        if function["name"] != kernel:
            called.add(without_types(function["name"]))
    assert sum(hot.values()) + sum(cold.values()) == len(AMD_ATOMIC.findall(assembly))

    def number(key: str) -> int:
        (value,) = re.findall(rf"^\s+\.{key}:\s+(\d+)$", assembly, re.M)
        return int(value)

    several_waves = number("max_flat_workgroup_size") > 64
    early = [
        function["name"]
        for function in AMD_FUNCTION.finditer(assembly)
        if several_waves and releases_early(function["body"])
    ]

    return Usage(
        registers=number("vgpr_count"),
        spill_bytes=number("vgpr_spill_count") + number("sgpr_spill_count"),
        cold_spill_bytes=0,
        stack_bytes=number("private_segment_fixed_size"),
        shared_bytes=shared,
        atomics=dict(sorted(hot.items())),
        cold_atomics=sum(cold.values()),
        functions=sorted(called),
        races=early,
        work=work,
    )


def releases_early(body: str) -> bool:
    """Whether one wave writes back what others may still be storing: before the last barrier in
    front of each release all have to wait for what they have under way. (Read line by line: wait
    and barrier stand together. A release with a compare-and-swap is Triton 3.6's own, which makes
    every one acq_rel: those of the heap are relaxed.)"""
    waited = met = early = False
    for step in AMD_STEP.finditer(body):
        if step["release"]:
            early = not met
        elif step["barrier"]:
            met = met or waited
        else:
            if step["access"] and early and not step["swap"]:
                return True
            waited = step["wait"] is not None
            met = met and step["access"] is None
            early = early and step["access"] is None
    return False
