// A LoRA adapter (arXiv 2106.09685) beside a model's weights: y = W x + scale B (A x), for the runs that ask for it. The
// packed weights are those of the model without it, and any number of adapters share them.
//
// The first factors, A, of products that are fed the same rows lie below one another as one matrix, in the finest format
// whose activations are those that the weights are multiplied with, so that nothing is converted twice; in panels of 16
// ranks, for in 64 most lines would be zeros, and what is foreseen by the stride would be read in vain. The second, B, are
// added to a register tile's sums before their epilogue: in bytes beside activations in bytes, with a scale a row; float32
// where activations are, or where their numbers differ too much; else float16, as where bytes would lose a rank. Each row of A is brought to a largest number
// from 1/2 to 1 by a power of two, which its rank of B takes over; and B as a whole, which the scale takes back.
#pragma once

#include <vector>

#include "arena.h"
#include "kernels.h"

namespace pronk {

constexpr int kProducts = 6, kFirsts = 4;  // of a layer: q, k, v, o, gate and up, down; and the rows they are fed
constexpr int kFirstOf[kProducts] = {0, 0, 0, 1, 2, 3};
constexpr int kGateUp = 4;

// A matrix as Kernels::first_factor takes it: of the same lines, of a word or a half a row, only those that ranks are in.
Matrix narrow(const Matrix& wide, Arena& memory);

struct Layer;

struct Adapter {
    // Of u [from, from + rank) become RankCodes at `to`.
    struct Rounded {
        int from, rank, to;
    };

    struct First {
        Matrix a;                   // [ranks, K]
        std::vector<float> scales;  // of each rank; none: nothing of these products is adapted
        std::vector<Rounded> rounded;
        int width = 0;              // of u, and of the codes behind it

        void finish(float* u, bool words) const;  // scales and rounds what `a` gave; `words`: Kernels::rank_words
    };

    // A product's weights, or the gate's or the up rows of it.
    struct Module {
        int layer, product;
        bool up;  // of a product that pairs rows
        int rank, rows, cols;
        const float *a, *b;  // [rank, cols], [rows, rank]
        float scale;
    };

    // Every number must be finite. Throws std::bad_alloc, and std::range_error where a product's scale is not.
    Adapter(const std::vector<Layer>& layers, const std::vector<Module>& modules);

    std::vector<First> firsts;     // [layers * kFirsts]
    std::vector<LowRank> seconds;  // [layers * kProducts]
    int widest = 0;                // of all Firsts
    Arena memory;
};

}  // namespace pronk
