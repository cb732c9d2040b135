"""PTX kernels, for `run_ptx.kernel`, that several test files run."""

# A ring of two stages of 128 bytes: warp 0 loads four tiles, warp 1 adds them up; out, tiles; 288 bytes.
PLACES = """
    and.b32 %r3, %r2, 1; shl.b32 %r5, %r3, 3; add.s32 %r5, %r1, %r5;
    shl.b32 %r6, %r3, 7; add.s32 %r6, %r1, %r6; shr.u32 %r4, %r2, 1; and.b32 %r4, %r4, 1;
"""
WAIT_EMPTY = "EMPTY: mbarrier.try_wait.parity.shared.b64 %p3, [%r5+272], %r4; @!%p3 bra EMPTY;"
WAIT_FULL = "FULL: mbarrier.try_wait.parity.shared.b64 %p3, [%r5+256], %r4; @!%p3 bra FULL;"
RING = f"""
    mov.b32 %r1, smem; mov.b32 %r2, 0; mov.b32 %r7, 0;
    setp.ne.u32 %p1, %r31, 0; @%p1 bra INITIALISED;
    mbarrier.init.shared.b64 [%r1+256], 1; mbarrier.init.shared.b64 [%r1+264], 1;
    mbarrier.init.shared.b64 [%r1+272], 32; mbarrier.init.shared.b64 [%r1+280], 32;
    INITIALISED: bar.sync 0;
    setp.ge.u32 %p2, %r31, 32; @%p2 bra CONSUMER; @%p1 bra END;
    PRODUCE: {PLACES}
    xor.b32 %r4, %r4, 1;
    {WAIT_EMPTY}
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5+256], 128;
    mul.wide.u32 %rd10, %r2, 128; add.s64 %rd10, %rd1, %rd10;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%rd10], 128, [%r5+256];
    add.s32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 4; @%p3 bra PRODUCE;
    bra END;
    CONSUMER: {PLACES}
    {WAIT_FULL}
    and.b32 %r9, %r31, 31; shl.b32 %r9, %r9, 2; add.s32 %r10, %r6, %r9;
    ld.shared.b32 %r8, [%r10];
    mbarrier.arrive.shared.b64 _, [%r5+272];
    add.s32 %r7, %r7, %r8;
    add.s32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 4; @%p3 bra CONSUMER;
    cvt.u64.u32 %rd11, %r9; add.s64 %rd11, %rd0, %rd11; st.global.b32 [%rd11], %r7;
    END:
"""

# A 64 × 16 and an 8 × 16 matrix, in core matrices of 8 × 8, multiplied.
# Parameters: out, operands; 128 threads, 2304 bytes.
WGMMA = """
    mov.b32 %r1, smem; shl.b32 %r2, %r31, 4; add.s32 %r2, %r1, %r2;
    mul.wide.u32 %rd10, %r31, 16; add.s64 %rd10, %rd1, %rd10;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd10];
    st.shared.v4.b32 [%r2], {%r4, %r5, %r6, %r7};
    setp.ge.u32 %p1, %r31, 16; @%p1 bra FILLED;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd10+2048];
    st.shared.v4.b32 [%r2+2048], {%r4, %r5, %r6, %r7};
    FILLED: fence.proxy.async.shared::cta;
    bar.sync 0;
    cvt.u64.u32 %rd11, %r1; shr.u64 %rd11, %rd11, 4; or.b64 %rd11, %rd11, 68720001024;
    add.s64 %rd12, %rd11, 128; setp.eq.u32 %p2, %r31, 5000;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r8, %r9, %r10, %r11}, %rd11, %rd12, %p2, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    add.s64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r8; st.global.b32 [%rd10+512], %r9;
    st.global.b32 [%rd10+1024], %r10; st.global.b32 [%rd10+1536], %r11;
    bar.sync 1;
    st.shared.b32 [%r2], 0;
"""
