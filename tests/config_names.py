"""Short names of GEMM configurations, for the ids of tests."""

from cutelab.kernels.dense_gemm.config import GemmConfig
from cutelab.kernels.dense_gemm.config_sm90 import Sm90Config


def config_name(config: GemmConfig | Sm90Config) -> str:
    c = config
    tile = "x".join(map(str, (*c.tile, c.stages)))
    aligns = f"a{c.a_align}{c.a_major}-b{c.b_align}{c.b_major}-c{c.c_align}-out{c.out_align}"
    name = f"{c.ab_dtype}-{c.out_dtype}-{aligns}-{c.bias}-{c.activation}-{tile}"
    if isinstance(c, GemmConfig):
        return name
    way = "streamk" if c.stream_k else "pingpong" if c.pingpong else f"cooperative{c.consumers}"
    early = "-early" if c.early_launch else ""
    return f"sm90-{name}-{way}-cluster{c.cluster[0]}x{c.cluster[1]}{early}"
