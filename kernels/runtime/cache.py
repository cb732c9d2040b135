"""Compiled kernels on disk, so that a second process need not compile them.

An entry is one relocatable object file followed by the SHA-256 of its bytes. Readers of ELF go by the
offsets in its header and ignore what follows, so the loader takes the file as it is; and nothing reaches
the loader before its digest was checked, because a truncated object would take the process down.

``CUTELAB_CACHE_DIR`` names the directory (default ``$XDG_CACHE_HOME/cutelab``, ``~/.cache/cutelab``);
``CUTELAB_CACHE=0`` turns the disk cache off.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from cutlass import CUDA_VERSION

__all__ = ["cache_directory", "cache_key", "load_entry", "store_entry", "write_and_rename"]

_GENERATING_PACKAGES = ("cutelab.layouts", "cutelab.copies", "cutelab.mmas", "cutelab.kernels")
_TOOLCHAIN = (
    "nvidia-cutlass-dsl",
    *(f"nvidia-cutlass-dsl-libs-{part}" for part in ("base", "core", "cu12", "cu13")),
    "apache-tvm-ffi",
)
_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_directory() -> Path | None:
    """The directory of the disk cache, or None when ``CUTELAB_CACHE=0`` turns it off."""
    if os.environ.get("CUTELAB_CACHE") == "0":
        return None
    explicit = os.environ.get("CUTELAB_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cutelab"


def cache_key(*parts: object) -> str:
    """A file name for what ``parts`` (by ``repr``) compile to with these sources, DSL and host CPU."""
    digest = hashlib.sha256()
    for part in (*parts, _toolchain(), _source_digest(), _dsl_settings()):
        digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def load_entry(key: str) -> Path | None:
    """The path of a whole, unaltered entry, or None when there is none."""
    directory = cache_directory()
    if directory is None:
        return None
    path = directory / f"{key}.o"
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return path if hashlib.sha256(code).digest() == digest else None


def store_entry(key: str, code: bytes) -> None:
    """Write an entry; a directory that cannot be written costs one warning and the entry.

    The file is written beside its place and renamed into it, so a reader sees all of it or nothing, and
    of two processes that write the same entry the later one wins with the same bytes.
    """
    directory = cache_directory()
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_and_rename(directory / f"{key}.o", code + hashlib.sha256(code).digest())
    except OSError as error:
        _warn_unwritable(directory, str(error))


def write_and_rename(path: Path, content: bytes) -> None:
    """Readers of the file see all of it or what was there before."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@cache
def _warn_unwritable(directory: Path, reason: str) -> None:
    warnings.warn(
        f"compiled kernels are not kept in {directory}: {reason}; "
        "set CUTELAB_CACHE_DIR to a directory that can be written, or CUTELAB_CACHE=0",
        RuntimeWarning,
        stacklevel=2,
    )


@cache
def _toolchain() -> tuple[str | None, ...]:
    """The versions of what compiles, and the processor that the host half is compiled for.

    Where the libraries for CUDA 12 and 13 are both installed, the DSL takes those that the driver allows:
    the CUDA version says which.
    """
    return (*map(_installed_version, _TOOLCHAIN), str(CUDA_VERSION), _host_cpu())


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _source_digest() -> str:
    """SHA-256 over every Python file of the packages that generate code."""
    digest = hashlib.sha256()
    for package in _GENERATING_PACKAGES:
        spec = find_spec(package)
        for root in (spec and spec.submodule_search_locations) or ():
            for file in sorted(Path(root).rglob("*.py")):
                digest.update(f"{package}/{file.relative_to(root)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _dsl_settings() -> list[tuple[str, str]]:
    """The DSL's environment variables: some of them (line info, compiler options) change the code."""
    return sorted(item for item in os.environ.items() if item[0].startswith("CUTE_DSL_"))


def _host_cpu() -> str:
    """What the first processor of this machine is and can do: the host half of an object is built for it."""
    names = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    lines = []
    with open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if not line.strip():
                break
            if line.startswith(names):
                lines.append(line)
    return "".join(lines)
