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


@triton.constexpr_function
def nanoseconds():
    """The host's clock; only for the interpreter, which calls this each time it is executed."""
    from time import time_ns  # (in here, where the compiler does not look for device functions)

    return time_ns()


@triton.constexpr_function
def tell_host(event, *values):
    """Only for the interpreter: call what the host has to say to an event; it raises an error."""
    HOST[event](*values)


HOST = {}
