"""Attention in float64, in torch's own operations, and what may be lost in float16 or bfloat16."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Options:
    """What a call of attention is told besides its tensors."""

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float = 0.0

    def keywords(self):
        return vars(self)


def seen(queries, keys, options, device="cpu"):
    """Which keys each query sees: (queries, keys)."""
    i = torch.arange(queries, device=device)[:, None] + keys - queries
    j = torch.arange(keys, device=device)
    left, right = options.window
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if left is not None:
        mask &= j >= i - left
    if right is not None:
        mask &= j <= i + right
    return mask & (j <= i) if options.causal else mask


def attention(q, k, v, options, dtype=torch.float64):
    """Output (B, Sq, Hq, Dv) and LSE (B, Hq, Sq), with all intermediate values in `dtype`.

    Values of keys that no query sees don't count, whatever they are.
    """
    group = q.shape[2] // max(k.shape[2], 1)
    mask = seen(q.shape[1], k.shape[1], options, q.device)
    visible = mask.any(0)[None, :, None, None]
    q, k, v = q.to(dtype), k.to(dtype).where(visible, 0), v.to(dtype).where(visible, 0)
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(mask, torch.exp(scores - lse[..., None]), 0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def largest(values):
    return values.abs().max().item() if values.numel() else 0.0


def check(result, q, k, v, options):
    """The results of `flash_attention(…, return_lse=True)`: the error may be twice torch's in the same dtype,
    plus half a unit in the last place of the largest value; the LSE is right to float32's accumulation."""
    out, lse = result
    exact, exact_lse = attention(q, k, v, options)
    torchs, _ = attention(q, k, v, options, q.dtype)
    assert (out.shape, out.dtype) == (exact.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (exact_lse.shape, torch.float32)
    rounding = torch.finfo(out.dtype).eps / 2 * largest(exact)
    assert largest(out.double() - exact) <= 2 * largest(torchs.double() - exact) + rounding
    nothing = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, nothing)
    assert (out.transpose(1, 2)[nothing] == 0).all()
    difference = (lse.double() - exact_lse)[~nothing]
    assert largest(difference) <= 2**-18 * max(largest(exact_lse[~nothing]), 1.0)
