// Part 5 of 7: the steps over full-precision tokens.

// Stages the queries in the channels' own order, as B operands for full-precision keys.
__device__ __forceinline__ void stage_queries(const Rows& rows, const u16* q, int count, const Lane& me) {
#pragma unroll 1
    for (int at = me.warp; at < TILES * STEPS / 2; at += WARPS) {
        const int row = at / (STEPS / 2) * 8 + me.lane / 4;
        u32 x[4] = {};
        if (row < count) {
            const u32* from = reinterpret_cast<const u32*>(q + 8ll * rows.query[row]);
            from += at % (STEPS / 2) * 16 + me.lane % 4;
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = from[4 * i];
        }
        store_words(me.queries + at * 512, x);
    }
}

// Products of the warp's 16 full-precision tokens with all query rows; none where the unit is shorter.
__device__ __forceinline__ void slot_scores(float (&x)[1][TILES][4], u32 item, const Lane& me) {
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) x[0][i / 4][i % 4] = 0;
    if (16 * me.warp >= SLOTS) return;
    const u32 keys = item + me.slot_keys;
#pragma unroll
    for (int s = 0; s < STEPS; s += 2) {
        u32 a[2][4];
        load_matrices(a[0], keys + 32 * s);
        load_matrices(a[1], keys + 32 * s + 32);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            u32 b[4];
            load_words(b, me.queries + (t * STEPS + s) * 256);
            mma_element(x[0][t], a[0], b[0], b[1]);
            mma_element(x[0][t], a[1], b[2], b[3]);
        }
    }
}

// From products to base-2 scores relative to the rows' references, for tokens from slot `slot` on; warps without tokens
// have none that counts.
__device__ __forceinline__ void refer_slots(
    float (&x)[1][TILES][4], const Rows& rows, float factor, int slot, const Lane& me
) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * t + 2 * (me.lane % 4) + e, left = 16 * me.warp < SLOTS ? rows.limit[row] - slot : 0;
            const float start = LIFT - rows.top[row];
#pragma unroll
            for (int r = 0; r < 2; r++)
                x[0][t][2 * r + e] = me.lane / 4 + 8 * r < left ? fmaf(x[0][t][2 * r + e], factor, start) : MASKED;
        }
}

// Adds full-precision values, for the warp's channels.
__device__ __forceinline__ void add_slots(State& state, u32 item, const Lane& me) {
    const u32 values = item + me.slot_values;
#pragma unroll
    for (int s = 0; s < SLOTS / 16; s++) {
        u32 a[OUT_TILES][4];
#pragma unroll
        for (int m = 0; m < OUT_TILES; m++) load_matrices_transposed(a[m], values + 16 * s * SLOT_PITCH + 32 * m);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            u32 b[2];
            load_matrices(b, me.weights + (t * WARPS + s) * 512);
#pragma unroll
            for (int m = 0; m < OUT_TILES; m++) mma_element(state.out[m][t], a[m], b[0], b[1]);
        }
    }
}

// Attends to `units` units of full precision from slot `slot` on; `first`: nothing was attended to before.
__device__ __forceinline__ void attend_slots(
    State& state, Ring& ring, Rows& rows, const Source& source, const u16* q, int count, float factor, int slot,
    int units, bool first, const Lane& me
) {
    stage_queries(rows, q, count, me);
    slot += 16 * me.warp;
#pragma unroll 1
    for (; units > 0; units--, slot += SLOTS) {
        float x[1][TILES][4];
        u32 item = ring.wait();
        __syncthreads();  // queries are staged, and the last unit's values were read
        ring.copy_over_values(source);
        slot_scores(x, item, me);
        ring.advance();
        refer_slots(x, rows, factor, slot, me);
        exchange_weights(state, x, rows, nullptr, first, me);
        ring.copy_over_keys(source);
        item = ring.wait();
        add_slots(state, item, me);
        ring.advance();
        first = false;
    }
}
