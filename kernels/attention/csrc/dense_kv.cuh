// Part 5 of 7: the steps over full-precision tokens.

// Where a lane finds its part of an item. A warp has two tokens of each piece: row g + 8r of its scores is token r of
// those it has of piece g.
struct SlotLane {
    u32 keys, values;  // the latter for ldmatrix
    bool any;          // whether the warp has tokens at all

    __device__ __forceinline__ explicit SlotLane(const Lane& me) : any(16 * me.warp < SLOTS) {
        keys = Lane::opaque(me.lane / 4 * KEY_PITCH + 2 * me.warp * SLOT_BYTES + me.lane % 4 * 16);
        values = Lane::opaque(me.lane % 8 * VALUE_PITCH + me.lane / 16 * SLOT_BYTES + me.lane / 8 % 2 * 16 +
                              32 * OUT_TILES * me.warp);
    }
};

// Stages the queries as B operands for full-precision keys: a lane's four words are of adjacent channels, as keys' are.
__device__ __forceinline__ void stage_queries(const Rows& rows, const u16* q, int count, const Lane& me) {
#pragma unroll 1
    for (int at = me.warp; at < TILES * STEPS / 2; at += WARPS) {
        const int row = at / (STEPS / 2) * 8 + me.lane / 4;
        u32 x[4] = {};
        if (row < count) {
            const u32* from = reinterpret_cast<const u32*>(q + 8ll * rows.query[row]);
            from += at % (STEPS / 2) * 16 + me.lane % 4 * 4;
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = from[i];
        }
        store_words(me.queries + at * 512, x);
    }
}

// Products of the warp's 16 full-precision tokens with all query rows; none where the unit is shorter.
__device__ __forceinline__ void slot_scores(
    float (&x)[1][TILES][4], u32 item, const SlotLane& own, const Lane& me
) {
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) x[0][i / 4][i % 4] = 0;
    if (!own.any) return;
    const u32 keys = item + own.keys;
#pragma unroll
    for (int s = 0; s < STEPS; s += 2) {
        u32 k[2][4];
        load_words(k[0], keys + 32 * s);
        load_words(k[1], keys + 32 * s + SLOT_BYTES);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            u32 b[4];
            load_words(b, me.queries + (t * STEPS + s) * 256);
            mma_element(x[0][t], k[0][0], k[1][0], k[0][1], k[1][1], b[0], b[1]);
            mma_element(x[0][t], k[0][2], k[1][2], k[0][3], k[1][3], b[2], b[3]);
        }
    }
}

// From products to base-2 scores relative to the rows' references, for a lane's tokens from slot `slot` on; warps
// without tokens have none that counts.
__device__ __forceinline__ void refer_slots(
    float (&x)[1][TILES][4], const Rows& rows, float factor, int slot, const SlotLane& own, const Lane& me
) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * t + 2 * (me.lane % 4) + e, left = own.any ? rows.limit[row] - slot : 0;
            const float start = LIFT - rows.top[row];
#pragma unroll
            for (int r = 0; r < 2; r++)
                x[0][t][2 * r + e] = r < left ? fmaf(x[0][t][2 * r + e], factor, start) : MASKED;
        }
}

// Adds full-precision values, for the warp's channels.
__device__ __forceinline__ void add_slots(State& state, u32 item, const SlotLane& own, const Lane& me) {
    const u32 values = item + own.values;
#pragma unroll
    for (int s = 0; s < SLOTS / 16; s++) {
        u32 a[OUT_TILES][4];
#pragma unroll
        for (int m = 0; m < OUT_TILES; m++) load_matrices_transposed(a[m], values + 2 * s * SLOT_BYTES + 32 * m);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            u32 b[2];
            load_matrices(b, me.weights() + t * WEIGHT_BYTES + s * 512);
#pragma unroll
            for (int m = 0; m < OUT_TILES; m++)
                mma_element(state.out[m][t], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
        }
    }
}

// Attends to `units` units of full precision from slot `slot` on; `first`: nothing was attended to before.
__device__ __forceinline__ void attend_slots(
    State& state, Ring& ring, Rows& rows, const Source& source, const u16* q, int count, float factor, int slot,
    int units, bool first, const Lane& me
) {
    stage_queries(rows, q, count, me);
    const SlotLane own(me);
    slot += me.lane / 4 * PIECE + 2 * me.warp;
#pragma unroll 1
    for (; units > 0; units--, slot += SLOTS) {
        float x[1][TILES][4];
        u32 item = ring.wait();
        __syncthreads();  // queries are staged, and the last unit's values were read
        ring.copy_over_values(source);
        slot_scores(x, item, own, me);
        ring.advance();
        refer_slots(x, rows, factor, slot, own, me);
        exchange_weights(state, x, rows, nullptr, first, me);
        ring.copy_over_keys(source);
        item = ring.wait();
        add_slots(state, item, own, me);
        ring.advance();
        first = false;
    }
}
