// Sums of a few rows over weights of bfloat16 numbers in panels, and what they take.
//
// The weight of PANEL outputs lies together, pairs of inputs one after another, each with all
// outputs' two numbers: w[panel][pair][output][2]. Who reads a panel does so from one end to the
// other. The order of a sum does not depend on how many rows there are.

#pragma once

#include "vectors.h"

#if defined(OUTRIDER_VECTORS)
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

namespace panels {

using vectors::Bfloat16;
using vectors::LANES;
using vectors::Vector;

constexpr int VECTORS = 2, PANEL = LANES * VECTORS;
// Rows whose sums are kept at a time, and bytes that come from memory together.
constexpr long MANY_ROWS = 96, LINE = 64;

inline long smaller(long a, long b) { return a < b ? a : b; }

// Numbers of a panel of so many inputs.
inline long size(long width) { return (width + 1) / 2 * 2 * PANEL; }

inline size_t whole_lines(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// Bytes that begin with a cache line and stay this thread's for its next call; null: there are none.
inline char* scratch(size_t bytes) {
  static thread_local std::unique_ptr<char[]> kept;
  static thread_local size_t num_kept = 0;
  if (num_kept < bytes + LINE) {
    kept.reset();
    num_kept = 0;
    kept.reset(new (std::nothrow) char[bytes + LINE]);
    if (!kept) return nullptr;
    num_kept = bytes + LINE;
  }
  return (char*)whole_lines((size_t)kept.get());
}

// What rows are read as: as they lie where an instruction multiplies pairs of them, or made ready for
// tiles of them, as float32.
#if defined(OUTRIDER_PAIRS)
typedef Bfloat16 Ready;
#else
typedef float Ready;
#endif
// Numbers that rows need to be made ready; rows made so by who asks, or by all threads of a team.
size_t room(long rows, long width);
const Ready* ready(const Bfloat16* x, Ready* to, long rows, long width);
const Ready* ready_together(const Bfloat16* x, Ready* to, long rows, long width);

// The sums of up to MANY_ROWS rows over one panel: sums[r, o], which lie on a cache line. `after` is
// the weight that is read next.
void add_up(const Ready* x, const Bfloat16* w, float* sums, long rows, long width,
            const Bfloat16* after);

// y = sums + bias, which may be null, for the outputs that a panel has of them all.
template <typename Out>
void put(const float* sums, const Bfloat16* bias, Out* y, long rows, long count, long outputs) {
  alignas(LINE) Bfloat16 added[PANEL] = {};
  if (bias) std::memcpy(added, bias, outputs * sizeof(Bfloat16));
  for (long r = 0; r < rows; r++) {
    Out found[PANEL];
    Out* to = outputs == PANEL ? y + r * count : found;
#pragma GCC unroll 64
    for (int o = 0; o < PANEL; o += LANES)
      vectors::store(to + o, vectors::load(sums + r * PANEL + o) + vectors::load(added + o));
    if (to == found) std::memcpy(y + r * count, found, outputs * sizeof(Out));
  }
}

}  // namespace panels
#endif
