// Hierarchical quantization of keys and values, for groups of 128 tokens in 16 bits; docs/kernels/kv_cache.md explains
// how it works. A CTA takes one group of one KV head, of keys (blockIdx.z == 0) or of values.

#include "quantize.cuh"

#ifndef __CUDACC_RTC__  // editors show one variant
#define CONFIG_HEAD_DIM 128
#define CONFIG_PLANES 2
#define CONFIG_BF16 1
#endif

struct Config {
    // Compiled variant: `options` in kv_cache/cuda.py passes the value of each as -DCONFIG_NAME.
    static constexpr int HEAD_DIM = CONFIG_HEAD_DIM;  // 64 or 128
    static constexpr int PLANES = CONFIG_PLANES;      // 1 upper codes, 2 upper and lower codes
    using Elem = Element<CONFIG_BF16 != 0>;           // dtype of keys and values

    static constexpr int GROUP = KV_GROUP;
    static constexpr int LANES = HEAD_DIM / 8;       // lanes per token; each holds 8 of its channels
    static constexpr int STREAMS = 16;               // tokens that a CTA reads at once
    static constexpr int TOKENS = GROUP / STREAMS;   // tokens per lane
    static constexpr int THREADS = STREAMS * LANES, WARPS = THREADS / 32;
    static constexpr int RESIDENT_THREADS = 768;     // per SM
};

// QuantizeParams in kv_cache/cuda.py has the same layout.
struct QuantizeParams {
    const u16 *keys, *values;                // [batch, kv_heads, slots, HEAD_DIM], by the strides below
    const int* group_index;                  // [batch]: first group of each row to write; paged: [batch, groups]
    const u8* mask;                          // bool [batch], or null: every row
    const int* first_slot;                   // [batch]: start of each row's single group; null: groups from slot 0 on
    QuantizedPlanes key_codes, value_codes;  // written; rows are (batch row, KV head)
    int kv_heads, group_capacity;
    // Strides in units of 8 elements, so that they fit 32 bits.
    int key_batch_stride, key_head_stride, key_stride;
    int value_batch_stride, value_head_stride, value_stride;
    int paged;  // whether every group has a page of its own, of which there are `group_capacity`
};

// Grid: (batch row, KV head) pairs; groups; keys and values.
extern "C" __global__ void __launch_bounds__(Config::THREADS, Config::RESIDENT_THREADS / Config::THREADS)
    quantize(const __grid_constant__ QuantizeParams p) {
    // It may start early, but lets no other kernel start early: attention reads codes before it waits.
    pdl_wait();
    const int batch = blockIdx.x / p.kv_heads, kv_head = blockIdx.x % p.kv_heads;
    const i64 slot = p.first_slot ? p.first_slot[batch] : i64(blockIdx.y) * Config::GROUP;
    if (p.mask && !p.mask[batch]) return;
    const GroupIndex index{p.group_index, batch, p.group_capacity, p.paged ? p.kv_heads : 0, kv_head};
    if (blockIdx.z == 0) {
        const i64 stride = i64(p.key_stride) * 8;
        const i64 head = (i64(batch) * p.key_batch_stride + i64(kv_head) * p.key_head_stride) * 8;
        quantize_keys<Config>(p.keys + head + slot * stride, stride, index, p.key_codes);
    } else {
        const i64 stride = i64(p.value_stride) * 8;
        const i64 head = (i64(batch) * p.value_batch_stride + i64(kv_head) * p.value_head_stride) * 8;
        quantize_values<Config>(p.values + head + slot * stride, stride, index, p.value_codes);
    }
}
