"""What the code is being compiled for."""

import triton
import triton.language as tl


@triton.constexpr_function
def has_ptx():
    """Whether the code is being compiled for a CUDA device (and not interpreted)."""
    if triton.knobs.runtime.interpret:
        return False
    target = tl.target_info.current_target()
    return target is not None and target.backend == "cuda"


@triton.constexpr_function
def has_amdgcn():
    """Whether the code is being compiled for an AMD device of the CDNA family (gfx9)."""
    if triton.knobs.runtime.interpret:
        return False
    target = tl.target_info.current_target()
    return target is not None and target.backend == "hip" and target.arch.startswith("gfx9")


@triton.constexpr_function
def is_interpreted():
    return triton.knobs.runtime.interpret


@triton.jit
def assembly(
    text: tl.constexpr, registers: tl.constexpr, x, dtype: tl.constexpr, pure: tl.constexpr = False
):
    """What instructions in the target's assembly make of the operands ``x`` (a tuple), lane by
    lane. Those that are not ``pure`` stay where they are, and each thread that holds a lane
    executes them."""
    return tl.inline_asm_elementwise(text, registers, x, dtype=dtype.value, is_pure=pure, pack=1)


@triton.jit
def anew(x):
    """``x`` (int32); but the compiler does not know it, and computes what depends on it anew.

    Otherwise what is the same in each turn of a loop, a caller's too, is computed before the loop
    and kept in registers all through, and these decide how many programs run at one time.
    """
    return assembly("mov.b32 $0, $1;", "=r,r", (x,), tl.int32) if has_ptx() else x


@triton.constexpr_function
def nanoseconds():
    """The host's clock; only for the interpreter, which calls this each time it is executed."""
    from time import time_ns  # (in here, where the compiler does not look for device functions)

    return time_ns()


@triton.constexpr_function
def let_host_run():
    """Only for the interpreter, in loops that wait for another thread of the host: this one would
    hardly let go of Python's lock."""
    from time import sleep  # (see `nanoseconds`)

    sleep(0.001)


@triton.constexpr_function
def tell_host(event, *values):
    """Only for the interpreter: call what the host has to say to an event; it raises an error."""
    HOST[event](*values)


HOST = {}
