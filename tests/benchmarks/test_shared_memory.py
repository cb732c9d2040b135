"""Reading Nsight Compute's listing, from a few lines of one."""

import shared_memory

LISTING = """"Kernel Name","gemm"
"Address","Source","L1 Wavefronts Shared","L1 Wavefronts Shared Ideal"
"1","      LDSM.16.M88.4 R4, [R2] ","1,024 (1024)","1,024"
"2","@!P0  LDSM.16.M88.4 R8, [R2] ","2048","1024"
"3","      HMMA.16816.F32 R4, R4, R8, R4 ","0","0"
"Kernel Name","gemm"
"Address","Source","L1 Wavefronts Shared","L1 Wavefronts Shared Ideal"
"1","      STS.64 [R2], R4 ","64","64"
""".splitlines()


def test_wavefronts_are_summed_by_opcode():
    assert shared_memory.wavefronts(LISTING) == [
        {"LDSM.16.M88.4": {"wavefronts": 3072, "ideal": 2048}},
        {"STS.64": {"wavefronts": 64, "ideal": 64}},
    ]


def test_table_shows_conflicts(monkeypatch):
    monkeypatch.setattr(shared_memory, "PROBLEMS", (("bf16", "nn"), ("bf16", "nt")))
    text = shared_memory.table(shared_memory.records(shared_memory.wavefronts(LISTING), {}))
    assert "| bf16 | nn | LDSM.16.M88.4 | 3072 | 1024 |" in text
    assert "| bf16 | nt | STS.64 | 64 | 0 |" in text
