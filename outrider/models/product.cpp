// Products of a few rows with a weight, each number of which is read once for them: float32 where it
// lies, bfloat16 in panels.
//
// y[r, o] = bias[o] + sum over i of w[o, i] x[r, i]. Several outputs are summed at a time, so that
// the weight comes from memory in several streams, which is up to twice as fast as in one. The order
// of a sum does not depend on how many rows there are: neither do the bits of what comes out.

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

template <int N>
struct Lanes {
  typedef float Vector __attribute__((vector_size(4 * N), aligned(4), may_alias));
};
using Vector = Lanes<LANES>::Vector;

static inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

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

// Outputs at a time: their sums and a weight stay in registers.
constexpr int outputs(int rows) {
  int fit = (REGISTERS - 1) / rows - 1;
  return fit < 1 ? 1 : fit > MOST_OUTPUTS ? MOST_OUTPUTS : fit;
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
      for (int r = 0; r < ROWS; r++) sums[o][r] += load(weight) * load(x + r * width + at);
    }
#pragma GCC unroll 64
  for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 64
    for (int r = 0; r < ROWS; r++) {
      float rest = bias ? bias[o] : 0.0f;
      for (long i = at; i < width; i++) rest += w[o * width + i] * x[r * width + i];
      y[r * count + o] = sum<LANES>(sums[o][r]) + rest;
    }
}

template <int ROWS>
static void some(const float* x, const float* w, const float* bias, float* y, long width,
                 long count, long first, long last) {
  constexpr int OUTPUTS = outputs(ROWS);
  long o = first;
  for (; o + OUTPUTS <= last; o += OUTPUTS)
    tile<ROWS, OUTPUTS>(x, w + o * width, bias ? bias + o : nullptr, y + o, width, count);
  for (; o < last; o++)
    tile<ROWS, 1>(x, w + o * width, bias ? bias + o : nullptr, y + o, width, count);
}

typedef void (*Some)(const float*, const float*, const float*, float*, long, long, long, long);
static const Some SOME[MOST_ROWS] = {some<1>, some<2>, some<3>, some<4>, some<5>, some<6>};

// x [rows, width], w [count, width], bias [count] or null, y [rows, count]; all without gaps.
extern "C" void outrider_product(const float* x, const float* w, const float* bias, float* y,
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
}

#if defined(__AVX512BF16__)
#include <immintrin.h>

#include <cstring>

// bfloat16: the weight of PANEL outputs lies together, pairs of inputs one after another, each with
// all outputs' two numbers: w[panel][pair][output][2]. An instruction multiplies a pair of inputs
// with those of 16 outputs, and a thread reads its panels from one end to the other.
typedef unsigned short Bfloat16;
constexpr int VECTORS = 2, PANEL = 16 * VECTORS, TILE_ROWS = 8;
// Inputs of a panel that stay in a core's second cache while one tile of rows after another reads
// them, and rows whose sums are kept meanwhile.
constexpr long DEPTH = 4096, MANY_ROWS = 96;

static inline __m512bh pair_in_all_lanes(const Bfloat16* from, int numbers) {
  int both = 0;
  std::memcpy(&both, from, numbers * sizeof(Bfloat16));
  return (__m512bh)_mm512_set1_epi32(both);
}

// Which cache numbers that are needed next are asked into; those of a single tile come by themselves.
enum Ahead { NONE, SECOND, FIRST };

// sums[r, o] += sum over i of w[o, i] x[r, i], in the order of i. Meanwhile `next` is asked for,
// `step` bytes with each pair.
template <int ROWS, Ahead AHEAD_TO>
static void panel_tile(const Bfloat16* x, long width, const Bfloat16* w, float* sums, long depth,
                       const char* next, long step) {
  __m512 kept[ROWS][VECTORS];
#pragma GCC unroll 64
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
    for (int v = 0; v < VECTORS; v++) kept[r][v] = _mm512_load_ps(sums + r * PANEL + v * 16);
  auto add = [&](long at, int numbers) __attribute__((always_inline)) {
    __m512bh weights[VECTORS];
#pragma GCC unroll 64
    for (int v = 0; v < VECTORS; v++)
      weights[v] = (__m512bh)_mm512_loadu_si512(w + at * PANEL + v * 32);
#pragma GCC unroll 64
    for (int r = 0; r < ROWS; r++) {
      __m512bh pair = pair_in_all_lanes(x + r * width + at, numbers);
#pragma GCC unroll 64
      for (int v = 0; v < VECTORS; v++)
        kept[r][v] = _mm512_dpbf16_ps(kept[r][v], weights[v], pair);
    }
  };
  long at = 0;
  for (; at + 2 <= depth; at += 2, next += step) {
    if constexpr (AHEAD_TO != NONE) __builtin_prefetch(next, 0, AHEAD_TO == FIRST ? 3 : 2);
    add(at, 2);
  }
  if (at < depth) add(at, 1);
#pragma GCC unroll 64
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
    for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + r * PANEL + v * 16, kept[r][v]);
}

typedef void (*PanelTile)(const Bfloat16*, long, const Bfloat16*, float*, long, const char*, long);
template <Ahead TO>
static constexpr PanelTile PANEL_TILES[TILE_ROWS] = {
    panel_tile<1, TO>, panel_tile<2, TO>, panel_tile<3, TO>, panel_tile<4, TO>,
    panel_tile<5, TO>, panel_tile<6, TO>, panel_tile<7, TO>, panel_tile<8, TO>};

// One panel's outputs of up to MANY_ROWS rows; y begins at its first output.
static void one_panel(const Bfloat16* x, const Bfloat16* w, const Bfloat16* bias, Bfloat16* y,
                      long rows, long width, long count, long outputs) {
  alignas(64) float sums[MANY_ROWS * PANEL];
  std::memset(sums, 0, rows * PANEL * sizeof(float));
  long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  // Several tiles compute from a cache, and memory would idle: each asks for its share of the block
  // that comes next. Two find time to have it in the second cache, more in the first.
  const PanelTile* run = tiles == 1   ? PANEL_TILES<NONE>
                         : tiles == 2 ? PANEL_TILES<SECOND>
                                      : PANEL_TILES<FIRST>;
  for (long at = 0; at < width; at += DEPTH)
    for (long tile = 0; tile < tiles; tile++) {
      long from = rows * tile / tiles, upto = rows * (tile + 1) / tiles;
      long depth = width - at < DEPTH ? width - at : DEPTH, step = 4 * PANEL / tiles;
      const char* next = (const char*)(w + (at + depth) * PANEL) + depth / 2 * step * tile;
      run[upto - from - 1](x + from * width + at, width, w + at * PANEL, sums + from * PANEL, depth,
                           next, step);
    }
  for (int v = 0; v * 16 < outputs; v++) {
    __mmask16 some = outputs - v * 16 < 16 ? (1 << (outputs - v * 16)) - 1 : 0xffff;
    __m512 added = _mm512_setzero_ps();
    if (bias) {
      __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, bias + v * 16));
      added = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    for (long r = 0; r < rows; r++) {
      __m512 sum = _mm512_add_ps(_mm512_load_ps(sums + r * PANEL + v * 16), added);
      _mm256_mask_storeu_epi16(y + r * count + v * 16, some, (__m256i)_mm512_cvtneps_pbh(sum));
    }
  }
}

// x [rows, width], w in panels, bias [count] or null, y [rows, count]; all without gaps.
extern "C" void outrider_panels(const Bfloat16* x, const Bfloat16* w, const Bfloat16* bias,
                                Bfloat16* y, long rows, long width, long count, int threads) {
  long panels = (count + PANEL - 1) / PANEL, stride = (width + 1) / 2 * 2 * PANEL;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int thread = 0; thread < threads; thread++)
    for (long from = 0; from < rows; from += MANY_ROWS)
      for (long p = panels * thread / threads; p < panels * (thread + 1) / threads; p++) {
        long first = p * PANEL, left = count - first, some = rows - from;
        one_panel(x + from * width, w + p * stride, bias ? bias + first : nullptr,
                  y + from * count + first, some < MANY_ROWS ? some : MANY_ROWS, width, count,
                  left < PANEL ? left : PANEL);
      }
}
#endif
