// y = x W^T + bias for a few rows of x, or with FUSE_SWIGLU silu of the first half of these outputs times the second;
// for Hopper and newer. docs/kernels/linear.md explains how, and why it is built this way.
//
// CTAs share the output tiles of W, and those of one blockIdx.y take `rows_per_pass` rows of x. The SPLIT_K CTAs of a
// cluster split the inputs: sums of an output tile are sent to one of them and added up at the end. Or the X_MULTICAST
// CTAs of a cluster take output tiles each for itself, and fetch x together.
//
// In a CTA one warp produces stages of the weight, MMA_WARPS multiply, and one fetches x, adds up sums and stores. Once
// started they synchronize at mbarriers only, so that a warp may run ahead by as many stages as the pipeline holds and
// by SUM_BUFFERS output tiles; but MMA warps wait for each other after the first output tile, for its sums of x (4 and
// 8 bits). Where a stage becomes empty one lane arrives for its warp, after __syncwarp; where sums change hands every
// lane does, as compute-sanitizer's racecheck wants.

#include "consumer.cuh"
#include "epilogue.cuh"
#include "integer.cuh"
#include "producer.cuh"

using Config = LinearConfig;

// Where things lie in dynamic shared memory, in this order.
template <class Config> struct SharedLayout {
    u8* buffers;          // stages of the pipeline
    float* sums;          // sums of the MMA warps
    float* x_sums;        // sums of x over K tiles
    float* cluster_sums;  // from the cluster's CTAs
    u8* x;

    __device__ __forceinline__ SharedLayout(u8* shared, const LinearParams& p, int max_k_tiles)
        : buffers(shared),
          sums(reinterpret_cast<float*>(shared + p.stages * Weights<Config>::STAGE_BYTES)),
          x_sums(sums + Config::SUM_BUFFERS * Config::MMA_WARPS * Config::TILE_SUMS),
          cluster_sums(x_sums + max_k_tiles * Weights<Config>::X_SUM_COLUMNS) {
        const int cluster_tiles =
            Config::SPLIT_K > 1 ? (p.max_tiles + Config::SPLIT_K - 1) / Config::SPLIT_K * Config::SPLIT_K : 0;
        x = reinterpret_cast<u8*>(cluster_sums + cluster_tiles * Config::TILE_SUMS);
    }
};

// All threads of the CTA. Inside the branches of warps: ahead of these, the compiler would no longer know what is
// uniform.
__device__ __forceinline__ void cta_barrier() {
    __syncwarp();
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1)
#if CONFIG_SPLIT_K * CONFIG_X_MULTICAST > 1  // a kernel without clusters must not have the attribute
__cluster_dims__(Config::CLUSTER, 1, 1)
#endif
linear(const __grid_constant__ LinearParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Barriers<Config> barriers;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x % Config::SPLIT_K;
    const int k_tiles = p.inputs / Weights<Config>::K_TILE, k_begin = k_tiles * rank / Config::SPLIT_K;
    const int first_row = blockIdx.y * p.rows_per_pass, stride = gridDim.x / Config::SPLIT_K;
    const CtaWork<Config> work = {int(blockIdx.x) / Config::SPLIT_K, stride,
                                  (p.outputs + Config::TILE_OUTPUTS - 1) / Config::TILE_OUTPUTS, k_begin,
                                  k_tiles * (rank + 1) / Config::SPLIT_K - k_begin,
                                  min(p.rows_per_pass, p.rows - first_row), p.max_tiles};
    const int width = Config::FUSE_SWIGLU ? p.outputs / 2 : p.outputs;
    const Output<Config> output = {p.y + i64(first_row) * width, p.bias, p.outputs, width};
    const SharedLayout<Config> at(shared, p, (k_tiles + Config::SPLIT_K - 1) / Config::SPLIT_K);
    const u32 pitch = 2 * Weights<Config>::K_TILE * work.k_tiles | 64;

    const bool leads = elect_one();
    if (leads) barriers.init(warp, p.stages);
    if (warp == Config::PRODUCER_WARP) {
        cta_barrier();
        if (Config::CLUSTER > 1) cluster_arrive_relaxed();
        const Weights<Config> weights(p);
        if (leads) load_weights(weights, work, barriers, at.buffers, p);
        __syncwarp();
        if (Config::CLUSTER > 1) cluster_wait();
    } else {
        cta_barrier();
        if (warp == Config::EPILOGUE_WARP && leads) {
            if (!Config::INTEGER) expect_x(work, barriers);
            if (Config::SPLIT_K > 1) expect_cluster_sums(work, barriers, rank);
        }
        __syncwarp();
        if (Config::CLUSTER > 1) {  // all CTAs of the cluster have started
            cluster_arrive_relaxed();
            cluster_wait();
        }
        pdl_wait();  // MMA warps too: polling for x, they would slow down small kernels beside this one
        if (warp == Config::EPILOGUE_WARP) {
            const u8* const from = p.x + 2 * (i64(first_row) * p.inputs + k_begin * Weights<Config>::K_TILE);
            if (leads && !Config::INTEGER) load_x_rows(at.x, pitch, from, 2 * i64(p.inputs), work, barriers);
            __syncwarp();
            add_tiles(work, barriers, output, at.sums, at.cluster_sums, rank, lane);
        } else if (Config::INTEGER) {
            multiply_integers(work, barriers, at.buffers, p, at.x_sums, at.sums);
        } else {
            multiply(work, barriers, at.buffers, p.stages, at.x, pitch, at.x_sums, at.sums, lane);
            if (Config::X_MULTICAST > 1 && !work.num_tiles())  // what other CTAs send must still find this one
                for (int i = 0; i * work.k_tiles_per_x_part() < work.k_tiles; i++)
                    Barriers<Config>::wait_for_x(barriers.x + i);
        }
    }
    if (Config::SPLIT_K == 1) return;
    if (warp == Config::PRODUCER_WARP) pdl_wait();  // it writes as well
    store_cluster_sums(work, barriers, output, at.cluster_sums, rank);
}
