"""The package is whole however it is installed, and light to import.

Each mode is a real installation, from a copy of the checkout, into a fresh virtual environment
that borrows the running interpreter's site-packages for torch and Triton.
"""

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("LICENSE", "README.md", "devalloc", "kernels", "pyproject.toml")

# Prints where both packages came from, after checking what an import must not do.
PROBE = """
import os, sys
import devalloc
eager = {"triton", "devalloc.kernels", "devalloc.heap"} & set(sys.modules)
assert not eager, f"import devalloc also imported {sorted(eager)}"
os.environ["TRITON_INTERPRET"] = "1"
import devalloc.kernels as da
from devalloc import kernels
assert kernels is da
assert type(da.malloc).__name__ == "InterpretedFunction", type(da.malloc)
missing = [name for name in devalloc.__all__ if not hasattr(devalloc, name)]
assert not missing, missing
from importlib.resources import files
assert files("devalloc.interop").joinpath("bridge.c").is_file(), "what is compiled at run time"
print(os.path.dirname(devalloc.__file__))
print(os.path.dirname(da.__file__))
"""


def run(*command: object, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Environment:
    """A virtual environment that sees the running interpreter's packages, but not its devalloc."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.packages = folder / "lib" / version / "site-packages"
        # Folders named in a .pth file are searched, but their own .pth files are not read: an
        # editable devalloc out there stays out there.
        borrowed = [*site.getsitepackages(), site.getusersitepackages()]
        (self.packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")

    def install(self, *arguments: object, cwd: Path) -> None:
        pip = (sys.executable, "-m", "pip", "--python", self.python)
        flags = ("--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed")
        run(*pip, "install", *flags, *arguments, cwd=cwd)

    def probe(self, cwd: Path) -> tuple[Path, Path]:
        """Return the folders of devalloc and of devalloc.kernels, as imported from `cwd`."""
        package, kernels = run(self.python, "-c", PROBE, cwd=cwd).split("\n")[-3:-1]
        return Path(package), Path(kernels)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a build reads, so that building leaves nothing in the real checkout."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def test_wheel(checkout: Path, environment: Environment, elsewhere: Path) -> None:
    build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*build, "--wheel-dir", elsewhere, ".", cwd=checkout)
    (wheel,) = elsewhere.glob("devalloc-*.whl")
    environment.install(wheel, cwd=elsewhere)
    top_level = {entry.name for entry in environment.packages.iterdir() if entry.is_dir()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"devalloc"}

    # A distribution that owns the top-level name `kernels` must not be mistaken for ours.
    foreign = environment.packages / "kernels"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("raise ImportError('not ours')\n")
    package = environment.packages / "devalloc"
    assert environment.probe(elsewhere) == (package, package / "kernels")


def test_source_distribution(checkout: Path, environment: Environment, elsewhere: Path) -> None:
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, elsewhere, cwd=checkout)
    (archive,) = elsewhere.glob("devalloc-*.tar.gz")
    environment.install(archive, cwd=elsewhere)
    package = environment.packages / "devalloc"
    assert environment.probe(elsewhere) == (package, package / "kernels")


def test_plain_install(checkout: Path, environment: Environment, elsewhere: Path) -> None:
    environment.install(".", cwd=checkout)
    package = environment.packages / "devalloc"
    assert environment.probe(elsewhere) == (package, package / "kernels")
    # Started in the checkout, Python finds the folder devalloc/, which has no kernels/ inside.
    assert environment.probe(checkout) == (checkout / "devalloc", checkout / "kernels")


def test_editable_install(checkout: Path, environment: Environment, elsewhere: Path) -> None:
    environment.install("--editable", ".", cwd=checkout)
    assert environment.probe(elsewhere) == (checkout / "devalloc", checkout / "kernels")
    assert environment.probe(checkout) == (checkout / "devalloc", checkout / "kernels")


def test_no_install(checkout: Path, environment: Environment) -> None:
    assert environment.probe(checkout) == (checkout / "devalloc", checkout / "kernels")


def test_every_package_is_listed() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {
        ".".join((*above, *init.parent.relative_to(ROOT).parts))
        for folder, above in (("devalloc", ()), ("kernels", ("devalloc",)))
        for init in (ROOT / folder).glob("**/__init__.py")
    }
    assert packages == set(setuptools["packages"])


def test_unknown_name_is_an_attribute_error() -> None:
    import devalloc

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        devalloc.nothing  # noqa: B018
