"""Short names of GEMM configurations, for the ids of tests."""

from cutelab.kernels.dense_gemm.config import GemmConfig


def config_name(config: GemmConfig) -> str:
    c = config
    tile = "x".join(map(str, (*c.tile, c.stages)))
    aligns = f"a{c.a_align}{c.a_major}-b{c.b_align}{c.b_major}-c{c.c_align}-out{c.out_align}"
    return f"{c.ab_dtype}-{c.out_dtype}-{aligns}-{c.bias}-{c.activation}-{tile}"
