"""Attention on CPU tensors, in the simulator with all its checks, next to torch in float64."""

import functools
import itertools

import pytest
import torch
from attention_reference import Options, check

from cutelab import simulator
from cutelab.kernels import flash_attention, flash_attention_varlen
from cutelab.kernels.attention import launch, plan
from cutelab.kernels.attention.config import TILINGS, ForwardConfig, shipped_configs, tilings
from cutelab.kernels.runtime.arch import Arch

ARCHS = ("sm_80", "sm_86", "sm_90a")
PLAIN = Options()


def normal(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def operands(q_shape, k_shape, value_dim=None, dtype=torch.bfloat16):
    """q (B, Sq, Hq, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv)."""
    v_shape = (*k_shape[:-1], value_dim or k_shape[-1])
    return [normal(*x, dtype=dtype, seed=i) for i, x in enumerate((q_shape, k_shape, v_shape))]


def among_nans(tensor):
    """The same values as a view of a buffer whose other elements, on all sides, are NaN."""
    buffer = torch.full([size + 2 * 8 for size in tensor.shape], torch.nan, dtype=tensor.dtype)
    view = buffer[tuple(slice(8, 8 + size) for size in tensor.shape)]
    return view.copy_(tensor)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Fresh memory holds NaNs."""
    empty = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kw: empty(*args, **kw).fill_(torch.nan))


def attend(q, k, v, options=PLAIN, arch="sm_80", seed=None):
    execute = functools.partial(simulator.execute, seed=seed)
    with simulator.gpu(arch, execute=execute):
        return flash_attention(q, k, v, return_lse=True, **options.keywords())


def compare(q, k, v, options=PLAIN, arch="sm_80"):
    check(attend(q, k, v, options, arch), q, k, v, options)


def forced(monkeypatch, config):
    """Makes the next calls use the tiling of `config`."""
    names = ("tile", "warps", "stages", "q_in_registers")
    options = {name: getattr(config, name) for name in names}
    monkeypatch.setattr(plan, "choose_tiling", lambda *_: options)
    monkeypatch.setattr(launch, "_plans", {})


def name(value):
    if not isinstance(value, ForwardConfig):
        return str(value)
    sides = f"{'left' * value.left}{'right' * value.right}" or "full"
    tile = "x".join(map(str, (*value.tile, value.warps, value.stages)))
    return f"{value.dtype}-{value.head_dim}-{value.value_dim}-{tile}-{sides}-{value.scores}"


SHIPPED = {config: arch for arch in reversed(ARCHS) for config in shipped_configs(Arch.named(arch))}


@pytest.mark.parametrize("config, arch", SHIPPED.items(), ids=name)
def test_every_shipped_configuration(monkeypatch, config, arch):
    """Ragged lengths around the tile, so that there are whole blocks, masked ones and padding."""
    forced(monkeypatch, config)
    queries, keys = config.tile[0] + 9, 3 * config.tile[1] + 5
    window = (config.tile[1] + 7 if config.left else None, 3 if config.right else None)
    options = Options(
        window=window,
        scale=-0.2 if config.scores == "scaled" else None,
        softcap=4.0 if config.scores == "capped" else 0.0,
    )
    q, k, v = operands(
        (1, queries, 2, config.head_dim),
        (1, keys, 1, config.head_dim),
        config.value_dim,
        getattr(torch, config.dtype),
    )
    q, k, v = among_nans(q), among_nans(k), among_nans(v)
    if config.varlen:
        compare_varlen(q[0], k[0], v[0], [0, queries], [0, keys], options, arch)
    else:
        compare(q, k, v, options, arch)


LENGTHS = [(1, 1), (1, 200), (200, 1), (63, 65), (64, 64), (129, 31), (130, 300)]
MASKS = [
    Options(),
    Options(causal=True),
    Options(window=(0, 0)),
    Options(window=(17, None)),
    Options(window=(None, 5)),
    Options(causal=True, window=(40, None)),
    Options(window=(70, 70), softcap=3.0),
]


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_masks_and_lengths(options):
    for queries, keys in LENGTHS:
        compare(*operands((1, queries, 1, 32), (1, keys, 1, 32)), options)


def test_masks_one_element_at_a_time():
    """With equal scores, a row of identity values shows which keys a query saw, and how many."""
    for queries, keys in ((4, 2), (3, 7), (70, 68)):
        q, k = torch.zeros(1, queries, 1, 8).half(), torch.zeros(1, keys, 1, 8).half()
        v = torch.eye(keys, 72).half()[None, :, None]
        sides = (None, 0, 1, 2, keys)
        for left, right, causal in itertools.product(sides, sides, (False, True)):
            options = Options(causal=causal, window=(left, right))
            out, lse = attend(q, k, v, options)
            check((out, lse), q, k, v, options)


def test_window_of_everything_before_is_causal():
    q, k, v = operands((1, 100, 1, 64), (1, 100, 1, 64))
    results = [attend(q, k, v, Options(causal=True)), attend(q, k, v, Options(window=(99, 0)))]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_rows_that_see_nothing():
    """Causal with more queries than keys: the first rows see none."""
    q, k, v = operands((2, 4, 2, 64), (2, 2, 2, 64))
    out, lse = attend(q, k, v, Options(causal=True))
    assert (out[:, :2] == 0).all() and (lse[..., :2] == -torch.inf).all()
    assert (lse[..., 2:] > -torch.inf).all()
    compare(*operands((1, 300, 1, 64), (1, 2, 1, 64)), Options(causal=True))  # whole tiles that see nothing


@pytest.mark.parametrize("q_shape, k_shape", [((2, 0, 4, 64), (2, 5, 2, 64)), ((0, 5, 4, 64), (0, 5, 2, 64))])
def test_no_queries(q_shape, k_shape):
    out, lse = attend(*operands(q_shape, k_shape))
    assert out.shape == q_shape and lse.shape == (q_shape[0], 4, q_shape[1])


def test_no_keys():
    q, k, v = operands((2, 70, 4, 64), (2, 0, 2, 64), 40)
    out, lse = attend(q, k, v)
    assert out.shape == (2, 70, 4, 40) and (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("heads, key_heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grouped_heads(heads, key_heads, dtype):
    compare(*operands((2, 70, heads, 64), (2, 90, key_heads, 64), dtype=dtype), Options(causal=True))


def test_heads_beyond_a_group(monkeypatch):
    """Tiles of all heads and sequences are computed once, whatever L2 holds."""
    for l2_bytes in (0, 100_000, 2**30):
        monkeypatch.setattr(plan, "L2_BYTES", l2_bytes)
        monkeypatch.setattr(launch, "_plans", {})
        compare(*operands((3, 130, 6, 16), (3, 70, 3, 16)), Options(causal=True))


@pytest.mark.parametrize("head_dim", [8, 24, 40, 72, 96, 104, 136, 200, 256])
def test_head_dims_are_padded(head_dim):
    compare(*operands((1, 40, 1, head_dim), (1, 70, 1, head_dim), 64 if head_dim > 128 else 136))


def layouts(tensor):
    """The same values under other strides, (B, S, H, D) each."""
    yield tensor.transpose(1, 2).contiguous().transpose(1, 2)
    yield tensor.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    yield among_nans(tensor)
    yield torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=2)[:, :, 0]
    odd = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 1), torch.nan, dtype=tensor.dtype)
    yield odd[..., 1:].copy_(tensor)  # rows that no vector is aligned to


def test_strides():
    q, k, v = operands((2, 70, 2, 40), (2, 90, 2, 40))
    expected = attend(q, k, v)
    for views in zip(layouts(q), reversed(list(layouts(k))), layouts(v), strict=True):
        for x, y in zip(attend(*views), expected, strict=True):
            assert torch.equal(x, y)


def test_expanded_operands():
    q, k, v = operands((1, 70, 1, 64), (1, 90, 1, 64))
    views = q.expand(2, 70, 2, 64), k.expand(2, 90, 2, 64), v.expand(2, 90, 2, 64)
    compare(*views)


def test_values_that_no_query_sees_may_be_nan():
    """Keys before the window of a short query, in the same block as those that it sees."""
    q, k, v = operands((1, 3, 1, 64), (1, 150, 1, 64))
    k[:, :110], v[:, :110] = torch.nan, torch.nan
    compare(q, k, v, Options(causal=True, window=(20, None)))


def test_nan_reaches_its_own_row_only():
    q, k, v = operands((1, 40, 1, 64), (1, 40, 1, 64))
    q[0, 7] = torch.nan
    out, lse = attend(q, k, v)
    assert out[0, 7].isnan().all() and lse[0, 0, 7].isnan()
    others = [i for i in range(40) if i != 7]
    assert not out[0, others].isnan().any() and not lse[0, 0, others].isnan().any()


def test_large_scores():
    """Maxima that rise block after block, far beyond what exp can hold, and fall again."""
    q, k, v = operands((1, 70, 1, 64), (1, 300, 1, 64), dtype=torch.float16)
    for order in (torch.arange(300), torch.arange(300).flip(0), (torch.arange(300) - 150).abs()):
        k = torch.ones(64) * order[None, :, None, None] / 64
        compare(q.abs() * 4, k.half(), v, Options())


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-3, 3.0])
def test_scales(scale):
    compare(*operands((1, 40, 1, 64), (1, 90, 1, 64)), Options(causal=True, scale=scale))


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap(softcap):
    q, k, v = operands((1, 40, 1, 64), (1, 90, 1, 64), dtype=torch.float16)
    compare(4 * q, k, v, Options(causal=True, softcap=softcap))


def compare_varlen(q, k, v, q_bounds, k_bounds, options=PLAIN, arch="sm_80"):
    lengths = [[b - a for a, b in itertools.pairwise(bounds)] for bounds in (q_bounds, k_bounds)]
    bounds = [torch.tensor(x, dtype=torch.int32) for x in (q_bounds, k_bounds)]
    with simulator.gpu(arch):
        out, lse = flash_attention_varlen(
            *(q, k, v, *bounds, *map(max, lengths)), return_lse=True, **options.keywords()
        )
    assert out.shape == (*q.shape[:-1], v.shape[-1]) and lse.shape == (q.shape[1], q.shape[0])
    for (a, b), (c, d) in zip(itertools.pairwise(q_bounds), itertools.pairwise(k_bounds), strict=True):
        part = out[None, a:b], lse[None, :, a:b]
        check(part, q[None, a:b], k[None, c:d], v[None, c:d], options)


@pytest.mark.parametrize("options", [Options(), Options(causal=True), Options(window=(30, 4))], ids=str)
def test_sequences_of_different_lengths(options):
    """Empty ones on either side, on both, and first and last."""
    q, k, v = operands((1, 260, 4, 64), (1, 300, 2, 64), 40)
    q_bounds = [0, 0, 70, 70, 71, 200, 260, 260]
    k_bounds = [0, 30, 30, 30, 130, 200, 300, 300]
    compare_varlen(among_nans(q[0]), among_nans(k[0]), among_nans(v[0]), q_bounds, k_bounds, options)


def test_neighbours_do_not_leak():
    """All but one sequence is NaN."""
    q, k, v = (x[0] for x in operands((1, 200, 1, 64), (1, 200, 1, 64)))
    for x in (q, k, v):
        x[:50], x[110:] = torch.nan, torch.nan
    bounds = torch.tensor([0, 50, 110, 200], dtype=torch.int32)
    with simulator.gpu("sm_80"):
        out, lse = flash_attention_varlen(q, k, v, bounds, bounds, 90, 90, causal=True, return_lse=True)
    part = (x[None, 50:110] for x in (q, k, v))
    check((out[None, 50:110], lse[None, :, 50:110]), *part, Options(causal=True))


def test_no_sequences():
    q, k, v = (x[0] for x in operands((1, 0, 2, 64), (1, 0, 2, 64)))
    bounds = torch.zeros(1, dtype=torch.int32)
    with simulator.gpu("sm_80"):
        assert flash_attention_varlen(q, k, v, bounds, bounds, 0, 0).shape == (0, 2, 64)


@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_warps_changes_the_result(seed):
    q, k, v = operands((1, 130, 2, 64), (1, 200, 1, 64))
    options = Options(causal=True, window=(90, None))
    for x, y in zip(attend(q, k, v, options, seed=seed), attend(q, k, v, options), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("arch", ARCHS)
def test_each_gpu_gets_a_tiling_that_it_can_hold(arch):
    gpu = Arch.named(arch)
    for head_dim, value_dim in itertools.product(range(8, 257, 8), (8, 64, 136, 256)):
        found = tilings(head_dim, value_dim, gpu)
        assert {tiling.tile[0] for tiling in found} >= {64}
        for tiling in found:
            config = ForwardConfig("bfloat16", head_dim, value_dim, **tiling.options())
            assert config.smem_bytes <= gpu.smem_per_block
    assert {tiling.tile for tiling in TILINGS} >= {tiling.tile for tiling in tilings(64, 64, gpu)}
