// Products of a few rows with a weight, each number of which is read once for them: float32 where it
// lies, bfloat16 in panels.
//
// y[r, o] = bias[o] + sum over i of w[o, i] x[r, i]. Several outputs are summed at a time, so that
// the weight comes from memory in several streams, which is up to twice as fast as in one. The order
// of a sum does not depend on how many rows there are: neither do the bits of what comes out.

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

#include "panels.h"

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 32;
#endif
constexpr int MOST_ROWS = 6, MOST_OUTPUTS = 8;
// Rows of a pass and outputs at a time; outputs of a block, whose weights stay in a core's cache while one pass after another reads them;
// and how many numbers ahead of its use a weight is asked for.
constexpr long BLOCK = 24, AHEAD = 256;
// Numbers of a pass's rows from which on they are not all in a core's first cache when the next outputs ask for them.
constexpr long WIDE = 6144;

template <int N>
struct Lanes {
  typedef float Vector __attribute__((vector_size(4 * N), aligned(4), may_alias));
};
using Vector = Lanes<LANES>::Vector;

static inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

// sum + a b, rounded once where the processor can. Left to the compiler it would be so in some tiles
// and not in others, and a row's bits would depend on how many rows there are.
static inline Vector plus(Vector sum, Vector a, Vector b) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, sum);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, sum);
#else
  return sum + a * b;
#endif
}

template <int N>
static inline float sum(const typename Lanes<N>::Vector& of) {
  if constexpr (N == 1) {
    return of[0];
  } else {
    union {
      typename Lanes<N>::Vector whole;
      typename Lanes<N / 2>::Vector half[2];
    } parts = {of};
    typename Lanes<N / 2>::Vector both = parts.half[0] + parts.half[1];
    return sum<N / 2>(both);
  }
}

// Outputs at a time: their sums and a weight stay in registers. Over wide rows one more, where its sums fit too, with a number of each row or of each
// weight, whichever are fewer: rows are read from further away then, and fewer times.
constexpr int outputs(int rows, bool wide) {
  int fit = (REGISTERS - 1) / rows - 1;
  fit = fit < 1 ? 1 : fit;
  int more = fit + 1, beside = more < rows ? more : rows;
  if (wide && rows * more + beside < REGISTERS) fit = more;
  return fit > MOST_OUTPUTS ? MOST_OUTPUTS : fit;
}

template <int ROWS, int OUTPUTS>
static void tile(const float* x, const float* w, const float* bias, float* y, long width,
                 long count) {
  Vector sums[OUTPUTS][ROWS] = {};
  long at = 0;
  for (; at + LANES <= width; at += LANES)
#pragma GCC unroll 64
    for (int o = 0; o < OUTPUTS; o++) {
      const float* weight = w + o * width + at;
      __builtin_prefetch(weight + AHEAD);
#pragma GCC unroll 64
      for (int r = 0; r < ROWS; r++)
        sums[o][r] = plus(sums[o][r], load(x + r * width + at), load(weight));
    }
#pragma GCC unroll 64
  for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 64
    for (int r = 0; r < ROWS; r++) {
      float rest = bias ? bias[o] : 0.0f;
      for (long i = at; i < width; i++)
        rest = __builtin_fmaf(w[o * width + i], x[r * width + i], rest);
      y[r * count + o] = sum<LANES>(sums[o][r]) + rest;
    }
}

template <int ROWS, int OUTPUTS>
static void over(const float* x, const float* w, const float* bias, float* y, long width,
                 long count, long first, long last) {
  long o = first;
  for (; o + OUTPUTS <= last; o += OUTPUTS)
    tile<ROWS, OUTPUTS>(x, w + o * width, bias ? bias + o : nullptr, y + o, width, count);
  for (; o < last; o++)
    tile<ROWS, 1>(x, w + o * width, bias ? bias + o : nullptr, y + o, width, count);
}

template <int ROWS>
static void some(const float* x, const float* w, const float* bias, float* y, long width,
                 long count, long first, long last) {
  if (ROWS * width > WIDE)
    over<ROWS, outputs(ROWS, true)>(x, w, bias, y, width, count, first, last);
  else
    over<ROWS, outputs(ROWS, false)>(x, w, bias, y, width, count, first, last);
}

typedef void (*Some)(const float*, const float*, const float*, float*, long, long, long, long);
static const Some SOME[MOST_ROWS] = {some<1>, some<2>, some<3>, some<4>, some<5>, some<6>};

// x [rows, width], w [count, width], bias [count] or null, y [rows, count]; all without gaps. 0: done.
extern "C" int outrider_product(const float* x, const float* w, const float* bias, float* y,
                                 long rows, long width, long count, int threads) {
  long blocks = (count + BLOCK - 1) / BLOCK, passes = (rows + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int thread = 0; thread < threads; thread++) {
    long first = blocks * thread / threads * BLOCK, end = blocks * (thread + 1) / threads * BLOCK;
    if (end > count) end = count;
    for (; first < end; first += BLOCK) {
      long last = first + BLOCK < end ? first + BLOCK : end;
      for (long pass = 0; pass < passes; pass++) {
        long from = rows * pass / passes, upto = rows * (pass + 1) / passes;
        SOME[upto - from - 1](x + from * width, w, bias, y + from * count, width, count, first,
                              last);
      }
    }
  }
  return 0;
}

#if defined(OUTRIDER_VECTORS)
using namespace panels;

// x [rows, width], w in panels, bias [count] or null, y [rows, count]; all without gaps. 0, or 1
// where memory is out.
template <typename Out>
static int over_panels(const Bfloat16* x, const Bfloat16* w, const Bfloat16* bias, Out* y,
                       long rows, long width, long count, int threads) {
  const long all = (count + PANEL - 1) / PANEL;
  Ready* const numbers = (Ready*)scratch(room(smaller(rows, MANY_ROWS), width) * sizeof(Ready));
  if (!numbers) return 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (long from = 0; from < rows; from += MANY_ROWS) {
    const long some = smaller(rows - from, MANY_ROWS);
    const Ready* own = ready_together(x + from * width, numbers, some, width);
#pragma omp for schedule(static)
    for (long p = 0; p < all; p++) {
      alignas(LINE) float sums[MANY_ROWS * PANEL];
      const Bfloat16* panel = w + p * size(width);
      add_up(own, panel, sums, some, width, panel + size(width));
      put(sums, bias ? bias + p * PANEL : nullptr, y + from * count + p * PANEL, some, count,
          smaller(count - p * PANEL, PANEL));
    }
  }
  return 0;
}

extern "C" int outrider_panels(const Bfloat16* x, const Bfloat16* w, const Bfloat16* bias,
                               Bfloat16* y, long rows, long width, long count, int threads) {
  return over_panels(x, w, bias, y, rows, width, count, threads);
}

// The same without a bias, and what comes out is not rounded.
extern "C" int outrider_panels_float(const Bfloat16* x, const Bfloat16* w, float* y, long rows,
                                     long width, long count, int threads) {
  return over_panels<float>(x, w, nullptr, y, rows, width, count, threads);
}

// Outputs whose weights lie together.
extern "C" const long outrider_panel = PANEL;
#endif
