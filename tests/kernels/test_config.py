"""Configurations that the kernel can't run are refused before anything is traced."""

import re

import pytest

from cutelab.kernels.dense_gemm.config import GemmConfig
from cutelab.kernels.dense_gemm.config_sm90 import Sm90Config
from cutelab.kernels.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ab_dtype": "int8"}, "ab_dtype is 'int8': must be one of 'float16', 'bfloat16', 'float32'"),
        ({"a_major": "m"}, "a_major is 'm': must be one of 'k', 'mn'"),
        ({"activation": "tanh"}, "activation is 'tanh': must be one of None, 'relu'"),
        ({"a_align": 3}, "a_align is 3: must be from 2 to 16, a power of two"),
        ({"b_align": 32}, "b_align is 32: must be from 2 to 16"),
        ({"ab_dtype": "float32", "a_align": 2}, "a_align is 2: must be from 4 to 16"),
        ({"out_dtype": "float32", "out_align": 2}, "out_align is 2: must be from 4 to 16"),
        ({"c_align": 1}, "c_align is 1: must be 0 or from 2 to 16"),
        ({"tile": (128, 128, 16)}, "tile is (128, 128, 16): must be multiples of 16 x warps"),
        ({"tile": (64, 64, 32), "warps": (8, 1)}, "of 16 along K, at least 32"),
        ({"stages": 1}, "stages is 1: must be at least 2"),
        ({"group": 0}, "group is 0: must be at least 1"),
    ],
)
def test_illegal_fields(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        GemmConfig(**{"ab_dtype": "float16", "out_dtype": "float16"} | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ab_dtype": "float32"}, "ab_dtype is 'float32': must be one of 'float16', 'bfloat16'"),
        ({"b_major": "n"}, "b_major is 'n': must be one of 'k', 'mn'"),
        ({"consumers": 4}, "consumers is 4: must be one of 1, 2, 3"),
        ({"out_align": 1}, "out_align is 1: must be from 2 to 16, a power of two"),
        ({"tile": (64, 256, 64)}, "tile is (64, 256, 64): must be a multiple of 128 rows up to 256"),
        ({"tile": (128, 208, 64)}, "16, 32, 64, 128, 192 or 256 columns"),
        ({"tile": (128, 256, 32)}, "64 or 128 along K"),
        ({"tile": (256, 256, 64)}, "a thread would keep 256 accumulators, and has 232 registers"),
        ({"tile": (192, 256, 64), "consumers": 3}, "keep 128 accumulators, and has 152 registers"),
        ({"stages": 1}, "stages is 1: must be at least 2"),
        ({"pingpong": True, "out_align": 8}, "pingpong is True: must be False unless there are 2 consumers"),
        ({"pingpong": True, "stream_k": True}, "no stream_k"),
        ({"cluster": (4, 1)}, "cluster is (4, 1): must be 1 or 2 along M and N"),
        ({"buffers": 0}, "buffers is 0: must be at least 1"),
    ],
)
def test_illegal_fields_for_hopper(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Sm90Config(**{"ab_dtype": "float16", "out_dtype": "float16"} | fields)
