"""Hopper's attention: the compiled kernel in the simulator with all its checks, and its machine code."""

import functools
import itertools
import math

import pytest
import torch
from attention_reference import Options, check

from cutelab import simulator
from cutelab.kernels.attention.config_sm90 import Sm90ForwardConfig
from cutelab.kernels.attention.fa3_sm90 import FlashAttention3Forward
from cutelab.kernels.runtime.arch import Arch
from cutelab.kernels.runtime.compile import compile_to_artifacts
from cutelab.kernels.runtime.disassembly import count, summarize
from cutelab.kernels.runtime.simulated import compile_simulated

HOPPER = Arch.named("sm_90a")
WORKERS = 3  # CTAs: each with several tiles
PLAIN = Options()


def normal(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def attend(config, q, k, v, options=PLAIN, group=2, seed=None, bounds=None):
    """Output (B, Sq, Hq, Dv) and LSE (B, Hq, Sq); with bounds, of q and of k, a batch of one holds all."""
    (_, queries, heads, head_dim), (keys, key_heads) = q.shape, k.shape[1:3]
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full((len(q), heads, queries), torch.nan)
    scale = head_dim**-0.5 * math.log2(math.e)
    factor = 1.0
    if config.scores == "capped":
        scale, factor = options.softcap * math.log2(math.e), head_dim**-0.5 / options.softcap
    left, right = options.window[0] or 0, 0 if options.causal else options.window[1] or 0
    lengths = queries, keys
    if bounds:
        lengths = (max(b - a for a, b in itertools.pairwise(each)) for each in bounds)
        bounds = [torch.tensor(each, dtype=torch.int32) for each in bounds]
    with simulator.gpu("sm_90a", execute=functools.partial(simulator.execute, seed=seed)):
        compile_simulated(FlashAttention3Forward(config), HOPPER)(
            *(x.data_ptr() for x in (q, k, v, out, lse)),
            *((each.data_ptr() for each in bounds) if bounds else (0, 0)),
            *(len(bounds[0]) - 1 if bounds else len(q), heads, key_heads, *lengths, left, right, group),
            *(step for x in (q, k, v, out) for step in (0 if bounds else x.stride(0), *x.stride()[1:3])),
            *(0 if bounds else lse.stride(0), lse.stride(1), queries, keys, WORKERS, scale, factor, 0),
        )
    return out, lse


def config_for(options, dtype="bfloat16", dims=(64, 64), **fields):
    left, right = options.window[0] is not None, options.causal or options.window[1] is not None
    scores = "capped" if options.softcap else "plain"
    return Sm90ForwardConfig(dtype, *dims, left, right, scores, **fields)


def compare(config, sizes, options=PLAIN, seed=None):
    """sizes: sequences, heads, heads of keys, queries, keys."""
    sequences, heads, key_heads, queries, keys = sizes
    dtype = getattr(torch, config.dtype)
    q = normal(sequences, queries, heads, config.head_dim, dtype=dtype, seed=0)
    k = normal(sequences, keys, key_heads, config.head_dim, dtype=dtype, seed=1)
    v = normal(sequences, keys, key_heads, config.value_dim, dtype=dtype, seed=2)
    result = attend(config, q, k, v, options, seed=seed)
    check(result, q, k, v, options)
    return result


MASKS = [
    PLAIN,
    Options(causal=True),
    Options(window=(17, None)),
    Options(window=(None, 5)),
    Options(window=(70, 20), softcap=3.0),
]


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("queries, keys", [(1, 1), (129, 31), (130, 300)])
def test_masks_and_lengths(options, queries, keys):
    compare(config_for(options, tile=(128, 64)), (1, 2, 1, queries, keys), options)


TILES = [
    {"dims": (64, 64), "tile": (192, 128)},
    {"dims": (128, 128), "tile": (128, 176)},
    {"dims": (128, 128), "tile": (128, 128), "pingpong": False},
    {"dims": (256, 256), "tile": (128, 64)},
    {"dims": (96, 40), "tile": (64, 96), "stages": 3},
    {"dims": (8, 128), "tile": (64, 64), "stages": 1},
]


@pytest.mark.parametrize("fields", TILES, ids=str)
def test_tiles_and_head_dims(fields):
    options = Options(causal=True)
    compare(config_for(options, "float16", **fields), (2, 3, 1, 250, 233), options)


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_warps_changes_the_result(seed):
    options = Options(causal=True)
    config = config_for(options, tile=(192, 64) if seed % 2 else (128, 64), pingpong=seed % 4 < 2)
    sizes = (1, 2, 2, 200, 140)
    ours = compare(config, sizes, options, seed)
    for x, y in zip(ours, compare(config, sizes, options), strict=True):
        assert torch.equal(x, y)


def test_tiles_that_see_nothing():
    options = Options(causal=True)
    out, lse = compare(config_for(options, tile=(64, 64)), (1, 1, 1, 300, 20), options)
    assert (out[:, :280] == 0).all() and (lse[..., :280] == -torch.inf).all()


@pytest.mark.parametrize("options", [PLAIN, Options(causal=True), Options(window=(20, 4))], ids=str)
def test_sequences_of_different_lengths(options):
    """Empty ones among them. Between them, and where no query of theirs looks, lie NaNs."""
    config = config_for(options, tile=(128, 64), dims=(64, 40), varlen=True)
    q, k, v = (
        torch.full((1, rows, heads, dim), torch.nan).bfloat16()
        for rows, heads, dim in ((300, 4, 64), (340, 2, 64), (340, 2, 40))
    )
    q_bounds, k_bounds = [0, 0, 70, 70, 71, 205, 290], [10, 40, 40, 40, 140, 210, 330]
    sequences = list(zip(itertools.pairwise(q_bounds), itertools.pairwise(k_bounds), strict=True))
    for (a, b), (c, d) in sequences[:-1]:
        first = c
        if options.window[0] is not None:
            first = min(d, max(c, c + (d - c) - (b - a) - options.window[0]))
        for x, span in ((q, (a, b)), (k, (first, d)), (v, (first, d))):
            part = x[:, span[0] : span[1]]
            part.copy_(normal(*part.shape, dtype=x.dtype, seed=span[0]))
    out, lse = attend(config, q, k, v, options, bounds=(q_bounds, k_bounds))
    for (a, b), (c, d) in sequences[:-1]:
        part = out[:, a:b], lse[..., a:b]
        check(part, q[:, a:b], k[:, c:d], v[:, c:d], options)
    (a, b), _ = sequences[-1]
    assert out[:, a:b].isnan().all() and lse[..., a:b].isnan().all()
    assert out[:, b:].isnan().all() and lse[..., b:].isnan().all()


def test_keys_that_no_query_sees_may_be_nan():
    options = Options(causal=True, window=(20, None))
    config = config_for(options, tile=(64, 64))
    q, k, v = (normal(1, rows, 1, 64, dtype=torch.bfloat16, seed=rows) for rows in (3, 150, 151))
    v = v[:, :150]
    k[:, :127], v[:, :127] = torch.nan, torch.nan
    check(attend(config, q, k, v, options), q, k, v, options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fields", [{"dims": (64, 64), "tile": (128, 192)}, *TILES[1:4]], ids=str)
def test_generated_code(fields, causal):
    config = config_for(Options(causal=causal), **fields)
    (kernel,) = summarize(compile_to_artifacts(FlashAttention3Forward(config), HOPPER).cubin)
    assert config.smem_bytes <= HOPPER.smem_per_block
    assert (kernel.stack, kernel.spills) == (0, 0)
    assert count(kernel.instructions, "WARPGROUP", "DEPBAR") == 4  # more, if products were serialised
    scores, outputs = config.width // 16, config.tile[1] // 16
    assert count(kernel.instructions, "HGMMA") == 2 * (
        scores + outputs
    )  # the first block's, and each other's
    assert count(kernel.instructions, "USETMAXREG") == 2
    assert count(kernel.instructions, "UTMALDG") > 0 and count(kernel.instructions, "UTMASTG") > 0
