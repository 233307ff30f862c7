// Part 4 of 4 of the CUDA linear kernels: y = x W^T + bias for a few rows of x, or if GATED silu of its first half of
// outputs times the second.

// Blocks share the row tiles of W, and those of one blockIdx.y take `chunk_rows` rows of x. The SPLITS blocks of a
// cluster cut the inputs: their sums of a row tile meet in one of them, and are added up at the end. Or the SHARES
// blocks of a cluster take row tiles each for itself, and fetch x together.
// Shared memory: slots of the ring, partial sums of the warps, sums of the units, those of the cluster, x.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
linear(const u8* x, const u8* w, const u16* bias, u16* y, int biased, int rows, int inputs, int outputs,
       int chunk_rows, int most_tiles, int items, int lead, int calm, int flight) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Barriers barriers;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x % SPLITS;
    const int units = inputs / UNIT_INPUTS, begin = units * rank / SPLITS, most_units = (units + SPLITS - 1) / SPLITS;
    const int first_row = blockIdx.y * chunk_rows, stride = gridDim.x / SPLITS;
    const Part part = {int(blockIdx.x) / SPLITS, stride, (outputs + 15) / 16, begin,
                       units * (rank + 1) / SPLITS - begin, min(chunk_rows, rows - first_row), most_tiles};
    const int width = GATED ? outputs / 2 : outputs;
    const Output output = {y + i64(first_row) * width, biased ? bias : nullptr, outputs, width};

    float* const partials = reinterpret_cast<float*>(shared + items * ITEM_BYTES);
    float* const sums = partials + BUFFERS * WARPS * TILE_FLOATS;
    float* const met = sums + most_units * SUM_COLUMNS;
    const int met_tiles = SPLITS > 1 ? (most_tiles + SPLITS - 1) / SPLITS * SPLITS : 0;
    u8* const own_x = reinterpret_cast<u8*>(met + met_tiles * TILE_FLOATS);
    const u32 pitch = 2 * UNIT_INPUTS * part.units | 64;

    // All meet in either branch below: ahead of them, the compiler would no longer know what is the same for a warp.
    const bool leads = elected();
    if (leads) barriers.init(warp, items);
    if (warp == COPIER) {
        start_meet();
        cluster_arrive();
        const Weights weights(w, inputs, outputs);
        if (leads) copy_items(weights, part, barriers, shared, items, lead, calm, flight);
        __syncwarp();
        cluster_wait();
    } else {
        start_meet();
        if (warp == ADDER && leads) {
            expect_x(part, barriers);
            if (SPLITS > 1) expect_met(part, barriers, rank);
        }
        __syncwarp();
        cluster_arrive();
        cluster_wait();  // all blocks of the cluster have started
        previous_wait();  // multipliers too: polling for x, they would slow down small kernels beside this one
        if (warp == ADDER) {
            const u8* const from = x + 2 * (i64(first_row) * inputs + begin * UNIT_INPUTS);
            if (leads) copy_x(own_x, pitch, from, 2 * i64(inputs), part, barriers);
            __syncwarp();
            add_tiles(part, barriers, output, partials, met, rank, lane);
        } else {
            multiply(part, barriers, shared, items, own_x, pitch, sums, partials, lane);
            if (SHARES > 1 && !part.own_tiles())  // what others send must find this block
                for (int i = 0; i * part.units_per_x_part() < part.units; i++) barrier_wait(barriers.x + i, 0);
        }
    }
    if (SPLITS == 1) return;
    if (warp == COPIER) previous_wait();  // it writes as well
    add_met(part, barriers, output, met, rank);
}
