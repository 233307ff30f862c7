// Hierarchical quantization of keys and values, for groups of 128 tokens in 16 bits; docs/kernels/kv_cache.md explains
// how it works. A CTA takes one group of one KV head, of keys (blockIdx.z == 0) or of values.

#include "quantize_keys.cuh"
#include "quantize_values.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_THREADS / THREADS)
    quantize(const __grid_constant__ QuantizeParams p) {
    // It may start early, but lets no other kernel start early: attention reads codes before it waits.
    pdl_wait();
    const int batch = blockIdx.x / p.kv_heads, kv_head = blockIdx.x % p.kv_heads;
    const i64 slot = p.first_slot ? p.first_slot[batch] : i64(blockIdx.y) * GROUP;
    if (p.mask && !p.mask[batch]) return;
    const GroupIndex index{p.group_index, batch, p.group_capacity};
    if (blockIdx.z == 0) {
        const i64 stride = i64(p.key_stride) * 8;
        const i64 head = (i64(batch) * p.key_batch_stride + i64(kv_head) * p.key_head_stride) * 8;
        quantize_keys(p.keys + head + slot * stride, stride, index, p.key_codes);
    } else {
        const i64 stride = i64(p.value_stride) * 8;
        const i64 head = (i64(batch) * p.value_batch_stride + i64(kv_head) * p.value_head_stride) * 8;
        quantize_values(p.values + head + slot * stride, stride, index, p.value_codes);
    }
}
