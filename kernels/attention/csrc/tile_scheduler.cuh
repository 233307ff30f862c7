// Part 2 of 7: how the work is cut into shares, and how a block's share is copied into its ring of items.

struct Lengths {
    const int *begin, *end, *groups;
    int batch, kv_heads, queries, capacity, group_capacity;

    // Read around the caches of a multiprocessor, which may be older than the kernels that let this one start early.
    __device__ int first_slot(int b) const { return __ldcg(begin + b); }
    __device__ int own_slot(int b) const { return __ldcg(end + b); }  // one past the first query's own token
    __device__ int visible_groups(int b) const { return BITS ? min(__ldcg(groups + b), group_capacity) : 0; }
    __device__ int last_slot(int b) const { return min(own_slot(b) + queries - 1, capacity); }
    __device__ int units(int b) const {  // of one KV head: quantized groups, then SLOTS full-precision tokens each
        const int slots = max(last_slot(b) - first_slot(b), 0);
        return visible_groups(b) + (slots + SLOTS - 1) / SLOTS;
    }
};

// All units of (batch row, KV head) after (batch row, KV head), cut into shares of consecutive units: share i
// starts at floor(i * total / shares), so rows of one length are cut at their ends when shares divide evenly.
// 32-bit arithmetic: i * (total % shares) stays below shares ** 2, and the launcher keeps shares below 2 ** 16.
struct Work {
    u32 total, shares, whole, rest;

    __device__ Work(const Lengths& lengths, u32 blocks, int lane) : total(0) {
        for (int b = 0; b < lengths.batch; b += 32)
            total += __reduce_add_sync(ALL, b + lane < lengths.batch ? u32(lengths.units(b + lane)) : 0u);
        total *= lengths.kv_heads;
        shares = min(blocks, total);
        whole = shares ? total / shares : 0;
        rest = total - whole * shares;
    }
    __device__ int first_unit(u32 share) const { return share * whole + share * rest / shares; }
    __device__ int share_of(int unit) const { return ((unit + 1ull) * shares - 1) / total; }
};

// The batch row that holds `unit`, and that row's first unit.
__device__ __forceinline__ int find_row(const Lengths& lengths, int unit, int lane, int& start) {
    start = 0;
    for (int b = 0;; b += 32) {
        const int own = b + lane < lengths.batch ? lengths.units(b + lane) * lengths.kv_heads : 0;
        int through = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(ALL, through, step);
            if (lane >= step) through += before;
        }
        const u32 beyond = __ballot_sync(ALL, start + through > unit);
        if (beyond) {
            const int at = __ffs(beyond) - 1;
            start += __shfl_sync(ALL, through - own, at);
            return b + at;
        }
        start += __shfl_sync(ALL, through, 31);
    }
}

// Where a (batch row, KV head) has its full-precision tokens; [0] keys, [1] values.
struct Source {
    const u16* slots[2];  // slot 0 of the buffers
    int stride[2];
    int first, last;  // visible slots, half-open
};

// The ring of items in shared memory. A unit is an item of keys, then one of values; all warps copy, and all read.
struct Ring {
    u32 data, full;  // shared addresses of the items and of their barriers
    int warp, lane;
    int fill, take;
    u32 phase;
    int unit, stop, groups;  // of the next copy; where copies end; of which this many are groups
    const u8* from[2];       // this warp's part of the next group's keys, values

    __device__ __forceinline__ void init() const {
        if (threadIdx.x < ITEMS) barrier_init(full + 8 * threadIdx.x, WARPS);
        fence_for_copies();
    }
    __device__ __forceinline__ u32 wait() const {
        barrier_wait(full + 8 * take, phase);
        return data + take * ITEM_BYTES;
    }
    __device__ __forceinline__ void advance() {
        if (++take == ITEMS) take = 0, phase ^= 1;
    }
    __device__ __forceinline__ static int part_step(int warp, bool value) {  // bytes from one group to the next
        return warp < 2 ? PLANE_BYTES : 2 * (value ? GROUP : HEAD_DIM);
    }
    // Starts on units `first` to `last` of a row with all but one of the items in flight; `keys`, `values`: this warp's
    // parts of its groups. Codes are copied before earlier kernels have ended, tokens of full precision after.
    __device__ __forceinline__ void start(
        const Source& source, const u8* keys, const u8* values, int visible, int first, int last
    ) {
        unit = first, stop = last, groups = visible;
        from[0] = keys + i64(first) * part_step(warp, false), from[1] = values + i64(first) * part_step(warp, true);
#pragma unroll 1
        for (int i = 0; i < ITEMS / 2; i++) {
            if (unit >= groups) wait_for_previous();
            copy_next<false>(source);
            if (2 * i + 2 < ITEMS) copy_next<true>(source);
        }
    }
    // In a unit, what to copy after the barrier that follows reading the last values, then after that of the keys.
    __device__ __forceinline__ void copy_over_values(const Source& source) { copy_next<ITEMS % 2 == 0>(source); }
    __device__ __forceinline__ void copy_over_keys(const Source& source) { copy_next<ITEMS % 2 == 1>(source); }

    template <bool VALUE> __device__ __forceinline__ void copy_next(const Source& source) {
        if (unit < stop) {
            const u32 to = data + fill * ITEM_BYTES, barrier = full + 8 * fill;
            if (BITS && unit < groups) copy_codes<VALUE>(to, barrier);
            else copy_slots<VALUE>(to, barrier, source);
            if (++fill == ITEMS) fill = 0;
        }
        unit += VALUE;
    }
    // Each warp copies a part, so that none is late for the next barrier.
    template <bool VALUE> __device__ __forceinline__ void copy_codes(u32 to, u32 barrier) {
        constexpr int PAIR_BYTES = 2 * (VALUE ? GROUP : HEAD_DIM);
        const int bytes = warp < 2 ? CODE_BYTES / 2 : PAIR_BYTES;
        if (lane == 0) {
            barrier_expect(barrier, bytes);
            bulk_copy(to + (warp < 2 ? warp * (CODE_BYTES / 2) : CODE_BYTES + (warp - 2) * PAIR_BYTES), from[VALUE],
                      bytes, barrier);
        }
        from[VALUE] += part_step(warp, VALUE);
    }
    // Adjacent tokens are copied a piece at a time, as bulk copies take long to issue. Slots past the last repeat it:
    // their weight is zero, and what is multiplied by it must be a number.
    template <bool VALUE> __device__ __forceinline__ void copy_slots(u32 to, u32 barrier, const Source& source) const {
        constexpr int OWN = SLOTS / WARPS;
        const int first = source.first + (unit - groups) * SLOTS + warp * OWN;
        const int step = source.stride[VALUE] == HEAD_DIM && first + OWN <= source.last ? PIECE : 1, row = lane * step;
        if (lane == 0) barrier_expect(barrier, OWN * SLOT_BYTES);
        __syncwarp();
        if (row >= OWN) return;
        const int slot = min(first + row, source.last - 1), piece = warp * OWN / PIECE + row / PIECE;
        bulk_copy(to + piece * (VALUE ? VALUE_PITCH : KEY_PITCH) + row % PIECE * SLOT_BYTES,
                  source.slots[VALUE] + i64(slot) * source.stride[VALUE], step * SLOT_BYTES, barrier);
    }
};
