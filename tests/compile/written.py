"""What torch.compile takes a kernel to write: ``python -m tests.compile.written``.

Prints, as JSON, the arguments that torch finds written by kernels of `user_kernels`, one for each
function of ``da``, and by that of `pointer` with a cast in its place. Torch does not see what a
kernel writes through addresses that were loaded, and drops a kernel that writes nothing.
"""

import json
import warnings

import torch
import triton
from torch._higher_order_ops import triton_kernel_wrap

from tests.compile import undispatched, user_kernels
from tests.compile.cases import LANES
from tests.compile.targets import TARGETS, Driver


def written(kernel: triton.runtime.JITFunction) -> list[str]:
    numbers = ("count", "LANES")
    arguments = {
        name: LANES if name in numbers else torch.empty(LANES, dtype=torch.int64)
        for name in kernel.arg_names
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning: the analysis failed, and everything is written
        warnings.filterwarnings("ignore", message=".*FP_FUSION.*")
        if hasattr(triton_kernel_wrap, "identify_accessed_tensors"):  # torch 2.13
            found = triton_kernel_wrap.identify_accessed_tensors(kernel, arguments, {})
            return sorted(access.name for access in found.read_writes.writes)
        return sorted(triton_kernel_wrap.identify_mutated_tensors(kernel, arguments, {}))


def main() -> None:
    triton.runtime.driver.set_active(Driver(TARGETS["cuda90"]))
    names = ("malloc", "free", "usable_size", "zeros", "realloc", "pointer")
    kernels = {name: getattr(user_kernels, f"{name}_lanes") for name in names}
    kernels["cast"] = undispatched.pointer_lanes
    print(json.dumps({name: written(kernel) for name, kernel in kernels.items()}))


if __name__ == "__main__":
    main()
