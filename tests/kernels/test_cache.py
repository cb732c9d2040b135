"""Compiling once, in memory and across processes, with a kernel so small that it compiles in a moment."""

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import pytest
from cutlass.cute.runtime import make_fake_stream, nullptr

from cutelab.kernels.runtime import cache, compile
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.compile import compile_kernel, compile_to_artifacts
from cutelab.kernels.runtime.errors import ConfigError

SM80 = Arch.named("sm_80")


@dataclass(frozen=True)
class FillConfig:
    value: float
    smem_bytes: int = 0


class Fill:
    """Sets one float32 to `config.value`."""

    def __init__(self, config: FillConfig):
        self.config = config

    def example_args(self) -> tuple:
        return nullptr(cutlass.Float32, cute.AddressSpace.gmem), make_fake_stream()

    @cute.jit
    def launch(self, out: cute.Pointer, stream):
        self.kernel(out).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Pointer):
        cute.make_tensor(out, 1)[0] = cutlass.Float32(self.config.value)


@pytest.fixture
def directory(monkeypatch, tmp_path) -> Path:
    """An empty disk cache, and nothing in memory."""
    path = tmp_path / "cache"
    monkeypatch.delenv("CUTELAB_CACHE", raising=False)
    monkeypatch.setenv("CUTELAB_CACHE_DIR", str(path))
    monkeypatch.setattr(compile, "_loaded", {})
    return path


@pytest.fixture
def compilations(monkeypatch, directory) -> list:
    """The configurations compiled since the start of the test."""
    seen = []

    def count(kernel, *args, compile=compile._compile):
        seen.append(kernel.config)
        return compile(kernel, *args)

    monkeypatch.setattr(compile, "_compile", count)
    return seen


def forget_loaded():
    """As a new process has it."""
    compile._loaded.clear()


def only_entry(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_kept_in_memory_by_config_and_arch(compilations):
    first = compile_kernel(Fill(FillConfig(1.0)), SM80)
    assert compile_kernel(Fill(FillConfig(1.0)), SM80) is first
    assert compile_kernel(Fill(FillConfig(2.0)), SM80) is not first
    assert compile_kernel(Fill(FillConfig(1.0)), Arch.named("sm_86")) is not first
    assert len(compilations) == 3


def test_loaded_from_disk(compilations, directory):
    compile_kernel(Fill(FillConfig(1.0)), SM80)
    forget_loaded()
    assert callable(compile_kernel(Fill(FillConfig(1.0)), SM80))
    assert len(compilations) == 1
    assert only_entry(directory).suffix == ".o"


def test_threads_compile_once(compilations):
    functions = []
    threads = [
        threading.Thread(target=lambda: functions.append(compile_kernel(Fill(FillConfig(1.0)), SM80)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1
    assert len(functions) == 4
    assert len(set(map(id, functions))) == 1


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "last byte lost": lambda content: content[:-1],
    "bit flipped": lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:],
    "digest lost": lambda content: content[:-32],
    "something else": lambda content: b"not an object file",
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_rebuilt(compilations, directory, damage):
    compile_kernel(Fill(FillConfig(1.0)), SM80)
    entry = only_entry(directory)
    whole = entry.read_bytes()
    entry.write_bytes(DAMAGES[damage](whole))
    assert cache.load_entry(entry.stem) is None
    forget_loaded()
    assert callable(compile_kernel(Fill(FillConfig(1.0)), SM80))
    assert len(compilations) == 2
    assert cache.load_entry(entry.stem) == only_entry(directory)


def test_directory_that_cannot_be_written(compilations, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("CUTELAB_CACHE_DIR", str(file / "cache"))
    with pytest.warns(RuntimeWarning, match=r"not kept in .*cache.*CUTELAB_CACHE_DIR") as warned:
        assert callable(compile_kernel(Fill(FillConfig(1.0)), SM80))
        assert callable(compile_kernel(Fill(FillConfig(2.0)), SM80))
    assert len(warned) == 1


def test_failed_write_leaves_nothing_behind(directory, monkeypatch):
    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(RuntimeWarning, match="no space left"):
        cache.store_entry("key", b"code")
    assert list(directory.iterdir()) == []


def test_switched_off(compilations, directory, monkeypatch):
    monkeypatch.setenv("CUTELAB_CACHE", "0")
    assert cache.cache_directory() is None
    assert callable(compile_kernel(Fill(FillConfig(1.0)), SM80))
    assert not directory.exists()


def test_directory_follows_the_environment(monkeypatch):
    monkeypatch.delenv("CUTELAB_CACHE", raising=False)
    monkeypatch.delenv("CUTELAB_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.cache_directory() == Path("/home/somebody/.cache/cutelab")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache.cache_directory() == Path("/var/cache/cutelab")
    monkeypatch.setenv("CUTELAB_CACHE_DIR", "/elsewhere")
    assert cache.cache_directory() == Path("/elsewhere")


def test_key_depends_on_all_that_the_code_depends_on(monkeypatch):
    keys = [cache.cache_key("kernel", FillConfig(1.0)), cache.cache_key("kernel", FillConfig(2.0))]
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    keys.append(cache.cache_key("kernel", FillConfig(1.0)))
    for name in ("_toolchain", "_source_digest"):
        monkeypatch.setattr(cache, name, lambda: "another")
        keys.append(cache.cache_key("kernel", FillConfig(1.0)))
    assert len(set(keys)) == len(keys)
    assert cache.cache_key("kernel", FillConfig(1.0)) == keys[-1]


def test_toolchain_covers_the_assembler(monkeypatch, tmp_path):
    """A second assembler beside that of the environment, then another release of it."""
    toolchains = [cache._toolchain.__wrapped__()]
    for release in ("0.1", "0.2"):
        info = tmp_path / release / f"nvidia_cutlass_dsl_libs_cu13-{release}.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: nvidia-cutlass-dsl-libs-cu13\nVersion: {release}\n"
        )
        monkeypatch.syspath_prepend(tmp_path / release)
        toolchains.append(cache._toolchain.__wrapped__())
    assert len(set(toolchains)) == 3


def test_source_digest_covers_names_and_contents(monkeypatch, tmp_path):
    (tmp_path / "package").mkdir()
    source = tmp_path / "package" / "__init__.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cache, "_GENERATING_PACKAGES", ("package",))
    digests = []
    for name, text in (("__init__.py", "x = 1"), ("__init__.py", "x = 2"), ("more.py", "x = 1")):
        source.with_name(name).write_text(text)
        digests.append(cache._source_digest.__wrapped__())
    assert len(set(digests)) == 3
    assert cache._source_digest.__wrapped__() == digests[-1]


@pytest.mark.parametrize("name, target", [("sm_80", "sm_80"), ("sm_89", "sm_89"), ("sm_90", "sm_90a")])
def test_arch_is_the_one_asked_for(monkeypatch, name, target):
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    artifacts = compile_to_artifacts(Fill(FillConfig(1.0)), Arch.named(name))
    assert f".target {target}\n" in artifacts.ptx
    assert artifacts.cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("run", [compile_kernel, compile_to_artifacts])
def test_shared_memory_beyond_the_chip(directory, run):
    limit = SM80.smem_per_block
    assert run(Fill(FillConfig(1.0, smem_bytes=limit)), SM80)
    with pytest.raises(ConfigError, match=rf"needs {limit + 1} bytes.*sm_80 may use at most {limit}"):
        run(Fill(FillConfig(2.0, smem_bytes=limit + 1)), SM80)


@pytest.mark.parametrize("run", [compile_kernel, compile_to_artifacts])
def test_no_assembler_for_the_chip(directory, monkeypatch, run):
    """As the DSL answers for sm_110a with the libraries for CUDA 12: a path in place of the cubin."""
    compiled = SimpleNamespace(__ptx__="/dump/launch.sm_110a.ptx", __cubin__="/dump/launch.sm_110a.cubin")
    monkeypatch.setattr(cute, "compile", lambda *args, **options: compiled)
    with pytest.raises(ConfigError, match=r"do not assemble for sm_110a.*cutelab\[cu13\]"):
        run(Fill(FillConfig(1.0)), Arch.named("sm_110a"))
    assert not directory.exists()


PROCESS = """
import sys, time
sys.path.insert(0, {folder!r})
import test_cache
from cutelab.kernels.runtime import compile
if {warm}:
    compile._compile = None
start = time.perf_counter()
function = compile.compile_kernel(test_cache.Fill(test_cache.FillConfig(1.0)), test_cache.SM80)
print(time.perf_counter() - start)
"""


def start_process(warm: bool) -> subprocess.Popen:
    code = PROCESS.format(folder=str(Path(__file__).parent), warm=warm)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def seconds(process: subprocess.Popen) -> float:
    output, _ = process.communicate()
    assert process.returncode == 0
    return float(output)


def test_processes_share_entries(directory):
    """Two processes that compile the same kernel at once, then one that must not compile."""
    together = [start_process(warm=False), start_process(warm=False)]
    for process in together:
        seconds(process)
    assert cache.load_entry(only_entry(directory).stem) is not None
    assert seconds(start_process(warm=True)) <= 0.05
