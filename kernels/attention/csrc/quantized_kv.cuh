// Part 4 of 7: the steps over quantized groups.

// A warp's queries as B operands in the codes' order, in halves. Each row is divided by a power of two that brings it
// to [-1, 1], so that q S of finite scales cannot overflow; the power goes into the row's factor.
__device__ __forceinline__ void load_queries(
    u32 (&own)[OWN_TILES][OWN_WORDS][4], Rows& rows, const u16* q, int count, float scale, const Lane& me
) {
    const int g = me.lane / 4, c = me.lane % 4, part = me.warp % PARTS;
#pragma unroll
    for (int j = 0; j < OWN_TILES; j++) {
        const int row = 8 * (me.warp / PARTS * OWN_TILES + j) + g;
        const bool there = row < count;
        const u32* from = reinterpret_cast<const u32*>(q + 8ll * rows.query[there ? row : 0]) + 2 * WORDS * c;
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 4 * WORDS; i++) {
            const u32 pair = from[HEAD_DIM / 4 * (i / (2 * WORDS)) + i % (2 * WORDS)];
            largest = fmaxf(largest, fmaxf(fabsf(float_of(u16(pair))), fabsf(float_of(u16(pair >> 16)))));
        }
        largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
        const int exponent = max((__float_as_int(largest) >> 23) - 126, -60);
        const float shrink = there ? power_of_two(-exponent) : 0;
#pragma unroll
        for (int i = 0; i < 2 * OWN_WORDS; i++) {
            const int w = i / 2, h = i % 2;
            const u32* pairs = from + HEAD_DIM / 4 * h + 2 * (part * OWN_WORDS + w);
            const u32 p0 = pairs[0], p1 = pairs[1];
            const u32 x0 = half2_of(float_of(u16(p0)) * shrink, float_of(u16(p0 >> 16)) * shrink);
            const u32 x1 = half2_of(float_of(u16(p1)) * shrink, float_of(u16(p1 >> 16)) * shrink);
            own[j][w][2 * h] = pair_first(x0, x1);
            own[j][w][2 * h + 1] = pair_second(x0, x1);
        }
        if (row < ROWS && c == 0) rows.factor[row] = scale * LOG2_E * power_of_two(exponent) / (BITS == 8 ? 16 : 1);
    }
}

// Stages queries times the group's key scales as B operands, and starts the scores at q . Z less what the codes'
// offsets will add. `item`: the group's keys.
__device__ __forceinline__ void scale_queries(
    Rows& rows, const u32 (&own)[OWN_TILES][OWN_WORDS][4], u32 item, const Lane& me
) {
    const int part = me.warp % PARTS, first_tile = me.warp / PARTS * OWN_TILES;
    if (first_tile >= TILES) return;
    // Of the products' sixteen rows eight are the same. Rows of minima: channels of low nibbles, then of high ones, so
    // of [0] (queries of low nibbles) the first count, of [1] the last.
    float minima[OWN_TILES][2][4] = {}, offsets[OWN_TILES][2][4] = {};
#pragma unroll
    for (int w = 0; w < OWN_WORDS; w++) {
        u32 scale[2][2], low[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            load_words(scale[h], item + me.scales + 8 * w + HEAD_DIM * h);
            load_words(low[h], item + me.scales + 2 * HEAD_DIM + 8 * w + HEAD_DIM * h);
#pragma unroll
            for (int i = 0; i < 2 && BITS == 4 && h == 1; i++) scale[h][i] = hmul2(scale[h][i], 0x2C002C00u);  // / 16
        }
        const u32 z0 = pair_first(low[0][0], low[0][1]), z1 = pair_second(low[0][0], low[0][1]);
        const u32 z2 = pair_first(low[1][0], low[1][1]), z3 = pair_second(low[1][0], low[1][1]);
#pragma unroll
        for (int j = 0; j < OWN_TILES; j++) {
            const u32(&q)[4] = own[j][w];
            u32 scaled[4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                scaled[2 * h] = hmul2(q[2 * h], pair_first(scale[h][0], scale[h][1]));
                scaled[2 * h + 1] = hmul2(q[2 * h + 1], pair_second(scale[h][0], scale[h][1]));
                mma_half(minima[j][h], z0, z2, z1, z3, q[2 * h], q[2 * h + 1]);
                mma_half(offsets[j][h], KEY_OFFSET, KEY_OFFSET, KEY_OFFSET, KEY_OFFSET, scaled[2 * h],
                         scaled[2 * h + 1]);
            }
            store_words(me.queries + ((first_tile + j) * WORDS + part * OWN_WORDS + w) * 512, scaled);
        }
    }
    if (me.lane >= 4) return;
#pragma unroll
    for (int j = 0; j < OWN_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * (first_tile + j) + 2 * me.lane + e;
            const float origin = (minima[j][0][e] + minima[j][1][2 + e]) + (offsets[j][0][e] + offsets[j][1][e]);
            const float shared = origin * (BITS == 8 ? 16 : 1) * rows.factor[row];  // INT8 codes count sixteenths
            rows.start[part][row] = part == 0 ? shared + LIFT - rows.top[row] : shared;
        }
}

// A lane's codes of two rows of some 16-row tiles, a few words of each row.
template <int TILES_, int WORDS_> struct Codes {
    u32 upper[TILES_][2][WORDS_], lower[TILES_][2][WORDS_];

    __device__ __forceinline__ void load(u32 first, int row_bytes, int tile_bytes) {
#pragma unroll
        for (int i = 0; i < 2 * TILES_; i++) {
            const u32 at = first + i / 2 * tile_bytes + i % 2 * row_bytes;
            load_words(upper[i / 2][i % 2], at);
            if (BITS == 8) load_words(lower[i / 2][i % 2], at + PLANE_BYTES);
        }
    }
    __device__ __forceinline__ void unpack_word(u32 (&pairs)[TILES_][2][4], int w) const {
#pragma unroll
        for (int i = 0; i < 2 * TILES_; i++)
            unpack(pairs[i / 2][i % 2], upper[i / 2][i % 2][w], BITS == 8 ? lower[i / 2][i % 2][w] : 0);
    }
};
// Products of the warp's 32 tokens of a group with all query rows.
__device__ __forceinline__ void key_scores(float (&x)[2][TILES][4], u32 item, const Lane& me) {
    constexpr int AT_ONCE = TILES < 4 ? 2 : 1;  // 16-token tiles whose codes registers hold
#pragma unroll
    for (int i = 0; i < 8 * TILES; i++) x[i / (4 * TILES)][i / 4 % TILES][i % 4] = 0;
#pragma unroll
    for (int tile = 0; tile < 2; tile += AT_ONCE) {
        Codes<AT_ONCE, WORDS> codes;
        codes.load(item + me.key_codes + tile * 64 * HEAD_DIM / 2, HEAD_DIM / 2, 64 * HEAD_DIM / 2);
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            u32 a[AT_ONCE][2][4];
            codes.unpack_word(a, w);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                u32 b[4];
                load_words(b, me.queries + (t * WORDS + w) * 512);
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int h = 0; h < AT_ONCE; h++)
                        mma_half(x[tile + h][t], a[h][0][2 * n], a[h][1][2 * n], a[h][0][2 * n + 1],
                                 a[h][1][2 * n + 1], b[2 * n], b[2 * n + 1]);
            }
        }
    }
}

// From products to base-2 scores relative to the rows' references.
__device__ __forceinline__ void refer_codes(float (&x)[2][TILES][4], const Rows& rows, const Lane& me) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * t + 2 * (me.lane % 4) + e;
            const float factor = rows.factor[row];
            float start = rows.start[0][row];
#pragma unroll
            for (int part = 1; part < PARTS; part++) start += rows.start[part][row];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i / 2][t][i % 2 * 2 + e] = fmaf(x[i / 2][t][i % 2 * 2 + e], factor, start);
        }
}

// Adds a group's values, for the warp's channels.
__device__ __forceinline__ void add_values(State& state, u32 item, const Lane& me) {
    Codes<OUT_TILES, 4> codes;
    codes.load(item + me.value_codes, 8 * GROUP / 2, 16 * GROUP / 2);
    // Where a warp has one tile, its products are two chains, as each waits for the one before.
    constexpr bool CHAINS = OUT_TILES * TILES == 1;
    float other[OUT_TILES][TILES][4] = {};
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 a[OUT_TILES][2][4];
        codes.unpack_word(a, w);
#pragma unroll
        for (int i = 0; i < 2 * OUT_TILES; i++) centre(a[i / 2][i % 2]);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            u32 b[4];
            load_matrices(b, me.weights() + t * WEIGHT_BYTES + w * 512);
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int m = 0; m < OUT_TILES; m++)
                    mma_half(CHAINS && h ? other[m][t] : state.out[m][t], a[m][0][2 * h], a[m][1][2 * h],
                             a[m][0][2 * h + 1], a[m][1][2 * h + 1], b[2 * h], b[2 * h + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4 && CHAINS; i++) state.out[0][0][i] += other[0][0][i];
}

// Attends to groups `at` to `stop` of a row, whose queries are the `count` from `q` on.
__device__ __forceinline__ void attend_groups(
    State& state, Ring& ring, Rows& rows, const Source& source, const u16* q, int count, float scale, int at, int stop,
    const Lane& me
) {
    u32 own[OWN_TILES][OWN_WORDS][4];
    load_queries(own, rows, q, count, scale, me);
    __syncthreads();
    bool first = true;
#pragma unroll 1
    for (; at < stop; at++) {
        float x[2][TILES][4];
        u32 item = ring.wait();
        scale_queries(rows, own, item, me);
        __syncthreads();  // queries are staged, and the last unit's values were read
        ring.copy_over_values(source);
        key_scores(x, item, me);
        ring.advance();
        refer_codes(x, rows, me);
        item = ring.wait();
        Tokens tokens;
        tokens.load(item, me);
        exchange_weights(state, x, rows, &tokens, first, me);
        ring.copy_over_keys(source);
        add_values(state, item, me);
        ring.advance();
        first = false;
    }
}
