// Part 3 of 7: the online softmax that a block shares. All four warps work on one unit: a warp computes the scores of
// its own tokens (S^T = K Q^T), all of them exchange weights through shared memory, and a warp adds up its own channels
// over all tokens (O^T = V^T P^T). So each code is unpacked once, whatever the number of query rows.
// `g` = lane / 4 and `c` = lane % 4 throughout; columns of all products are query rows.

constexpr int PARTS = TILES >= 4 ? 1 : 4 / TILES < WORDS ? 4 / TILES : WORDS;  // warps that share a tile's scaling
constexpr int OWN_TILES = TILES > 4 ? TILES / 4 : 1;                           // tiles of queries that a warp scales
constexpr int OWN_WORDS = WORDS / PARTS;
constexpr int WEIGHT_BYTES = 8 * 2 * GROUP;  // of a tile's staged weights

// What the warps of a block tell each other of the query rows.
struct Rows {
    int query[ROWS];           // where it lies from the KV head's first query, in units of 8 elements
    int out[ROWS];             // where its result lies from the KV head's first one, in elements
    float factor[ROWS];        // of a product of codes to a base-2 score
    float top[ROWS];           // reference of the weights: a base-2 score
    float start[PARTS][ROWS];  // parts of the score that all tokens of the group share, relative to the reference
    int limit[ROWS];           // first full-precision slot that the row does not see
    float exchange[2][WARPS][ROWS];
    int exponent[WARPS];
};

// Which lane of the block this is, and where in shared memory it reads and writes: computed once, and kept from the
// compiler, which would rather compute it again in every unit.
struct Lane {
    int warp, lane;
    u32 scales;         // of a keys' item: the scales of the channels whose queries it scales
    u32 key_codes;      // of a keys' item: codes of its first token
    u32 value_pairs;    // of a values' item: scale of its first token
    u32 value_codes;    // of a values' item: codes of its first channel
    u32 queries;        // staged queries: its part of the first fragment

    __device__ __forceinline__ explicit Lane(u32 staged)
        : warp(__shfl_sync(ALL, int(threadIdx.x) / 32, 0)), lane(threadIdx.x % 32) {
        const int g = lane / 4, c = lane % 4;
        scales = opaque(CODE_BYTES + 8 * (WORDS * c + warp % PARTS * OWN_WORDS));
        key_codes = opaque(first_token() * (HEAD_DIM / 2) + 4 * WORDS * c);
        value_pairs = opaque(CODE_BYTES + 2 * first_token());
        value_codes = opaque((16 * OUT_TILES * warp + g) * (GROUP / 2) + 16 * c);
        queries = opaque(staged + 16 * lane);
    }
    // Staged weights: its part of the first fragment.
    __device__ __forceinline__ u32 weights() const { return queries + QUERY_BYTES; }
    // Row g + 8r of a warp's score tile h is token first_token + r + 64h of the group: the tokens whose
    // value codes column c = g / 2 of the lanes holds as 16 consecutive bytes, in the order `unpack` leaves them.
    __device__ __forceinline__ int first_token() const {
        return 16 * (lane / 8) + 4 * warp + 2 * (lane / 4 % 2);
    }
    __device__ __forceinline__ static u32 opaque(u32 x) {
        asm volatile("" : "+r"(x));
        return x;
    }
};

// What a lane knows of the values of its tokens of a group: scales, each twice, and centres Z + 8 S.
struct Tokens {
    u32 scale[2][2];
    float centre[2][2];
    int exponent;  // the largest of the scales', as fp16 stores it

    __device__ __forceinline__ void load(u32 item, const Lane& me) {
        u32 largest = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 s = load_word(item + me.value_pairs + 128 * h);
            const u32 z = load_word(item + me.value_pairs + 2 * GROUP + 128 * h);
            scale[h][0] = __byte_perm(s, 0, 0x1010), scale[h][1] = __byte_perm(s, 0, 0x3232);
            centre[h][0] = fmaf(float_of_half(u16(s)), 8, float_of_half(u16(z)));
            centre[h][1] = fmaf(float_of_half(u16(s >> 16)), 8, float_of_half(u16(z >> 16)));
            largest = max(largest, max(s & 0xFFFF, s >> 16));
        }
        exponent = min(28, int(largest >> 10));
    }
};

// Running sums of a block's query rows: a warp's channels of the output, and a lane's tokens' part of the rest.
struct State {
    float out[OUT_TILES][TILES][4];  // weights times codes, times 2^(14 - exponent) and, for INT8, 16
    float total[TILES][2];           // weights
    float tail[TILES][2];            // weights times centres
    int exponent;                    // fp16 exponent of the largest value scale met

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            total[t][0] = total[t][1] = tail[t][0] = tail[t][1] = 0;
#pragma unroll
            for (int i = 0; i < 4 * OUT_TILES; i++) out[i / 4][t][i % 4] = 0;
        }
        exponent = 0;
    }
    __device__ __forceinline__ void rescale_out(float even, float odd, int t) {
#pragma unroll
        for (int i = 0; i < 4 * OUT_TILES; i++) out[i / 4][t][i % 4] *= i % 2 ? odd : even;
    }
    // From here on `out` counts in ones, so that full-precision values can be added.
    __device__ __forceinline__ void settle() {
        const float unit = power_of_two(exponent - 14 - (BITS == 8 ? 4 : 0));
#pragma unroll
        for (int t = 0; t < TILES; t++) rescale_out(unit, unit, t);
        exponent = 14;
    }
    // Moves the references up to the maxima of the block's tokens (to them, where they are the `first`), and the
    // exponent to the largest.
    template <int HALVES>
    __device__ __forceinline__ void raise(
        float (&x)[HALVES][TILES][4], Rows& rows, int own_exponent, bool first, const Lane& me
    ) {
        const int c = me.lane % 4;
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            float best = MASKED;
#pragma unroll
            for (int k = 0; k < 2 * HALVES; k++) best = fmaxf(best, x[k / 2][i / 2][k % 2 * 2 + i % 2]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) best = fmaxf(best, __shfl_xor_sync(ALL, best, step));
            if (me.lane < 4) rows.exchange[0][me.warp][4 * i - 3 * (i % 2) + 2 * c] = best;
        }
        own_exponent = __reduce_max_sync(ALL, max(own_exponent, exponent));
        if (me.lane == 0) rows.exponent[me.warp] = own_exponent;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS; w++) own_exponent = max(own_exponent, rows.exponent[w]);
        const float shrink = power_of_two(exponent - own_exponent);
        exponent = own_exponent;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            float fade[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int row = 8 * t + 2 * c + e;
                float best = MASKED;
#pragma unroll
                for (int w = 0; w < WARPS; w++) best = fmaxf(best, rows.exchange[0][w][row]);
                const float rise = best == MASKED ? 0 : first ? best - LIFT : fmaxf(best - LIFT, 0);
                if (me.warp == 0 && me.lane < 4) rows.top[row] += rise;
                fade[e] = first ? 1 : exp2_of(-rise);
                total[t][e] *= fade[e], tail[t][e] *= fade[e];
#pragma unroll
                for (int k = 0; k < 2 * HALVES; k++) x[k / 2][t][k % 2 * 2 + e] -= rise;
            }
            rescale_out(fade[0] * shrink, fade[1] * shrink, t);
        }
    }
};

// Turns scores into weights and stages them as B operands of the output: times the values' scales where these are
// codes. `tokens` is null for full precision. References that a score outgrew, or that are missing as the unit is the
// `first`, are set before, by all warps alike.
template <int HALVES>
__device__ __forceinline__ void exchange_weights(
    State& state, float (&x)[HALVES][TILES][4], Rows& rows, const Tokens* tokens, bool first, const Lane& me
) {
    float total[TILES][2], tail[TILES][2];
    for (bool may_outgrow = true;; may_outgrow = first = false) {
        const u32 unit = u32(29 - state.exponent) * 0x04000400u;  // the half 2^(14 - exponent), twice
        const u32 units[2] = {unit, BITS == 4 ? hmul2(unit, 0x2C002C00u) : unit};  // / 16, as `unpack` leaves INT4
        u32 largest = 0;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            total[t][0] = total[t][1] = tail[t][0] = tail[t][1] = 0;
            u32 weights[2 * HALVES];
#pragma unroll
            for (int i = 0; i < 2 * HALVES; i++) {
                const float even = exp2_of(x[i / 2][t][i % 2 * 2]), odd = exp2_of(x[i / 2][t][i % 2 * 2 + 1]);
                total[t][0] += even, total[t][1] += odd;
                weights[i] = tokens ? half2_of(even, odd) : element2_of(even, odd);
                largest = __vmaxu2(largest, weights[i]);  // positive numbers compare like their bits
                if (tokens) {
                    const float centre = tokens->centre[i / 2][i % 2];
                    tail[t][0] = fmaf(even, centre, tail[t][0]), tail[t][1] = fmaf(odd, centre, tail[t][1]);
                    weights[i] = hmul2(weights[i], hmul2(tokens->scale[i / 2][i % 2], units[i / 2]));
                }
            }
            store_matrices_transposed(me.weights() + t * WEIGHT_BYTES + me.warp * 512, weights);
            // Summed up here, or the compiler carries all weights across the barrier and spills.
            asm volatile("" : "+f"(total[t][0]), "+f"(total[t][1]), "+f"(tail[t][0]), "+f"(tail[t][1]));
        }
        const u32 limit = tokens || !BF16 ? HEADROOM_HALF : HEADROOM_BF16;
        bool outgrown = max(largest & 0xFFFF, largest >> 16) > limit;
        if (tokens) outgrown |= tokens->exponent > state.exponent;
        if (!__syncthreads_or(may_outgrow && (first || outgrown))) break;
        state.raise(x, rows, tokens ? tokens->exponent : 0, first, me);
    }
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        state.total[i / 2][i % 2] += total[i / 2][i % 2];
        state.tail[i / 2][i % 2] += tail[i / 2][i % 2];
    }
}
