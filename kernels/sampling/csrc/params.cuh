// Arguments of the kernel of top-k and top-p; FilterParams in sampling/top_k_top_p_cuda.py has the same layout.
#pragma once

struct FilterParams {
    const char* logits;                // [rows, vocab]
    float *peaks, *cutoffs, *masses;  // [rows]
    int vocab;
    int loads;     // 16-byte packs of a row that each thread holds
    float scale;   // log2(e) / temperature
    int top_k;     // 0 keeps all
    double top_p;  // 1 keeps all
};
