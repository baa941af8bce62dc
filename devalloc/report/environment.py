"""What this machine has and what works on it. Reports what is missing and never raises for it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "triton", "cuda-python", "numpy", "matplotlib")
TRUE_WORDS = ("1", "true", "yes", "on", "y")


@dataclass(frozen=True)
class Ability:
    """Something this package can do, whether it works here, and the reason or a detail."""

    name: str
    works: bool
    detail: str


@dataclass(frozen=True)
class Environment:
    """What `inspect_environment` found; every entry is (name, text)."""

    machine: list[tuple[str, str]]
    packages: list[tuple[str, str]]
    abilities: list[Ability]


def inspect_environment() -> Environment:
    """Inspect this machine. Imports torch and any CUDA libraries there are; starts no kernel.

    Maps 2 MiB on every CUDA device for a moment.
    """
    return Environment(
        machine=[
            ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
            ("CUDA driver", driver_version()),
            *devices(),
        ],
        packages=[(name, package_version(name)) for name in PACKAGES],
        abilities=[
            gpu_ability(),
            interpreter_ability(),
            cuda_malloc_ability(),
            virtual_memory_ability(),
            picture_ability(),
        ],
    )


def interpreting() -> bool:
    """Whether TRITON_INTERPRET asks for the interpreter, read as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in TRUE_WORDS


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def why_not_importable(module: str) -> str | None:
    """The reason why a module cannot be imported, on one line, or None if it can."""
    try:
        import_module(module)
    except Exception as error:  # a broken installation raises anything
        return f"{module}: {str(error).partition(chr(10))[0] or type(error).__name__}"
    return None


def driver_version() -> str:
    """The CUDA version that the driver supports, through cuda-python, or why it is not known."""
    if why_not_importable("cuda.bindings.driver"):
        return "unknown (cuda-python is not installed)"
    from cuda.bindings import driver

    try:
        status, number = driver.cuDriverGetVersion()
    except Exception:  # the bindings raise when they find no library, or none with this function
        return "none (no driver library found)"
    if int(status) != 0 or number == 0:
        return f"none ({status.name})"
    return f"supports CUDA {number // 1000}.{number % 1000 // 10}"


def devices() -> list[tuple[str, str]]:
    reason = why_not_importable("torch")
    if reason:
        return [("devices", f"unknown ({reason})")]
    import torch

    if not torch.cuda.is_available():
        return [("devices", "none: " + why_no_gpu())]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        capability = f"compute capability {properties.major}.{properties.minor}"
        found.append((f"cuda:{index}", f"{properties.name}, {memory:.0f} GiB, {capability}"))
    return found


def why_no_gpu() -> str:
    """Why torch sees no CUDA device."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "this PyTorch is built for the CPU only"
    if driver_version().startswith("none"):
        return "there is no CUDA driver"
    return "PyTorch finds no usable CUDA device"


def gpu_ability() -> Ability:
    name = "kernels on the GPU"
    reason = why_not_importable("torch") or why_not_importable("triton")
    if reason:
        return Ability(name, False, reason)
    import torch

    if not torch.cuda.is_available():
        return Ability(name, False, why_no_gpu())
    if interpreting():
        return Ability(name, False, "TRITON_INTERPRET is set: unset it to use the GPU")
    return Ability(name, True, torch.cuda.get_device_name())


def interpreter_ability() -> Ability:
    reason = why_not_importable("torch") or why_not_importable("triton")
    detail = reason or "TRITON_INTERPRET=1; slow, and shows no races"
    return Ability("kernels in Triton's interpreter", reason is None, detail)


def cuda_malloc_ability() -> Ability:
    """Whether cudaMalloc can be called: the source of heaps on a GPU."""
    name = "heaps from cudaMalloc"
    reason = why_not_importable("cuda.bindings.runtime")
    if reason:
        return Ability(name, False, reason)
    from cuda.bindings import runtime

    try:
        status, count = runtime.cudaGetDeviceCount()
    except Exception as error:  # the bindings raise when they find no library
        return Ability(name, False, str(error).partition("\n")[0])
    if int(status) != 0 or count == 0:
        return Ability(name, False, f"the CUDA runtime says {status.name}")
    return Ability(name, True, f"through cuda-python, {count} device{'s' if count > 1 else ''}")


def virtual_memory_ability() -> Ability:
    """Whether memory can be mapped on every CUDA device: tried with the least that can be."""
    name = 'source "virtual" on the GPU'
    reason = why_not_importable("torch")
    if reason:
        return Ability(name, False, reason)
    import torch

    if not torch.cuda.is_available():
        return Ability(name, False, f"{why_no_gpu()}; on the CPU its double works")
    return virtual_memory_on([torch.device("cuda", at) for at in range(torch.cuda.device_count())])


def virtual_memory_on(devices: list[torch.device]) -> Ability:
    """`virtual_memory_ability` for these devices."""
    from devalloc.sources import VirtualSource
    from devalloc.sources.cuda_pages import CudaPages

    name = 'source "virtual" on the GPU'
    for device in devices:
        try:
            source = VirtualSource(device, CudaPages(device))  # with idle handles of its own
            source.free(source.allocate(1), 1)
            source.trim()
        except Exception as error:  # the bindings raise when they find no library
            return Ability(name, False, f"{device}: {str(error).partition(chr(10))[0]}")
    unit = source.granularity >> 20
    return Ability(name, True, f"mapped on demand, in multiples of {unit} MiB")


def picture_ability() -> Ability:
    reason = why_not_importable("matplotlib")
    return Ability("pictures (demo, view)", reason is None, reason or "PNG")
