// Products of a few rows with a weight, each number of which is read once for them: float32 where it
// lies, bfloat16 in panels.
//
// y[r, o] = bias[o] + sum over i of w[o, i] x[r, i]. Several outputs are summed at a time, so that
// the weight comes from memory in several streams, which is up to twice as fast as in one. The order
// of a sum does not depend on how many rows there are: neither do the bits of what comes out.

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

#include <cstring>
#include <new>
#include <vector>

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

// bfloat16: the weight of PANEL outputs lies together, pairs of inputs one after another, each with
// all outputs' two numbers: w[panel][pair][output][2]. A thread reads its panels from one end to the
// other.
typedef unsigned short Bfloat16;
constexpr int VECTORS = 2, PANEL = LANES * VECTORS;

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    !defined(OUTRIDER_NO_PAIRS)
// An instruction multiplies a pair of inputs with those of 16 outputs.
constexpr int TILE_ROWS = 8;
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

static inline void store(Bfloat16* to, __mmask16 some, __m512 numbers) {
  _mm256_mask_storeu_epi16(to, some, (__m256i)_mm512_cvtneps_pbh(numbers));
}
static inline void store(float* to, __mmask16 some, __m512 numbers) {
  _mm512_mask_storeu_ps(to, some, numbers);
}

// One panel's outputs of up to MANY_ROWS rows; y begins at its first output.
template <typename Out>
static void one_panel(const Bfloat16* x, const Bfloat16* w, const Bfloat16* bias, Out* y,
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
      store(y + r * count + v * 16, some, sum);
    }
  }
}

// x [rows, width], w in panels, bias [count] or null, y [rows, count]; all without gaps. 0: done.
template <typename Out>
static int over_panels(const Bfloat16* x, const Bfloat16* w, const Bfloat16* bias, Out* y,
                       long rows, long width, long count, int threads) {
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
  return 0;
}

#elif defined(__FMA__)
// Without such instructions both numbers of a pair become float32, which takes a shift or a mask, and
// are multiplied one after the other.
constexpr int TILE_ROWS = LANES == 16 ? 12 : 6;
// Inputs of a panel that stay in a core's first cache while one tile of rows after another reads
// them; rows whose sums are kept meanwhile; and bytes that a weight is asked for ahead of its use.
constexpr long DEPTH = 1024, MANY_ROWS = 96, BYTES_AHEAD = 1024;

typedef unsigned Bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
constexpr unsigned UPPER = 0xffff0000u;

static inline float from_bits(unsigned bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// To the nearest, of two to the even one.
static inline Bfloat16 rounded(float number) {
  unsigned bits;
  std::memcpy(&bits, &number, sizeof bits);
  unsigned even = (bits + (0x7fffu + (bits >> 16 & 1))) >> 16;
  return number == number ? even : 0x7fc0;
}

static inline void put(Bfloat16& to, float number) { to = rounded(number); }
static inline void put(float& to, float number) { to = number; }

static inline Vector in_all_lanes(float number) { return number - Vector{}; }

// A tile's rows as float32, pairs one after another, each with all rows' two numbers: to[pair][row][2].
static void spread(const Bfloat16* x, float* to, long rows, long width) {
  for (long at = 0; at < width; at += 2)
    for (long r = 0; r < rows; r++, to += 2) {
      to[0] = from_bits(unsigned(x[r * width + at]) << 16);
      to[1] = at + 1 < width ? from_bits(unsigned(x[r * width + at + 1]) << 16) : 0.0f;
    }
}

// sums[r, o] += sum over i of w[o, i] x[r, i], in the order of i.
template <int ROWS>
static void panel_tile(const float* x, const Bfloat16* w, float* sums, long pairs) {
  Vector kept[ROWS][VECTORS];
#pragma GCC unroll 64
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
    for (int v = 0; v < VECTORS; v++) kept[r][v] = load(sums + r * PANEL + v * LANES);
  for (long pair = 0; pair < pairs; pair++, x += 2 * ROWS, w += 2 * PANEL) {
    Bits both[VECTORS];
#pragma GCC unroll 64
    for (int v = 0; v < VECTORS; v++) {
      both[v] = *(const Bits*)(w + v * 2 * LANES);
      __builtin_prefetch((const char*)(w + v * 2 * LANES) + BYTES_AHEAD);
    }
#pragma GCC unroll 2
    for (int which = 0; which < 2; which++) {
      Vector weight[VECTORS];
#pragma GCC unroll 64
      for (int v = 0; v < VECTORS; v++)
        weight[v] = (Vector)(which ? both[v] & UPPER : both[v] << 16);
#pragma GCC unroll 64
      for (int r = 0; r < ROWS; r++) {
        Vector input = in_all_lanes(x[2 * r + which]);
#pragma GCC unroll 64
        for (int v = 0; v < VECTORS; v++) kept[r][v] = plus(kept[r][v], weight[v], input);
      }
    }
  }
#pragma GCC unroll 64
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
    for (int v = 0; v < VECTORS; v++) *(Vector*)(sums + r * PANEL + v * LANES) = kept[r][v];
}

typedef void (*PanelTile)(const float*, const Bfloat16*, float*, long);
static const PanelTile PANEL_TILES[] = {
    panel_tile<1>, panel_tile<2>, panel_tile<3>, panel_tile<4>,  panel_tile<5>,  panel_tile<6>,
    panel_tile<7>, panel_tile<8>, panel_tile<9>, panel_tile<10>, panel_tile<11>, panel_tile<12>};

// One panel's outputs of up to MANY_ROWS rows, which were spread tile by tile; y begins at its first
// output.
template <typename Out>
static void one_panel(const float* x, const Bfloat16* w, const Bfloat16* bias, Out* y,
                      long rows, long pairs, long count, long outputs) {
  float sums[MANY_ROWS * PANEL];
  std::memset(sums, 0, rows * PANEL * sizeof(float));
  long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (long at = 0; at < pairs; at += DEPTH / 2)
    for (long tile = 0; tile < tiles; tile++) {
      long from = rows * tile / tiles, some = rows * (tile + 1) / tiles - from;
      long depth = pairs - at < DEPTH / 2 ? pairs - at : DEPTH / 2;
      PANEL_TILES[some - 1](x + 2 * (from * pairs + at * some), w + at * 2 * PANEL,
                            sums + from * PANEL, depth);
    }
  for (long r = 0; r < rows; r++)
    for (long o = 0; o < outputs; o++)
      put(y[r * count + o],
          sums[r * PANEL + o] + (bias ? from_bits(unsigned(bias[o]) << 16) : 0.0f));
}

// x [rows, width], w in panels, bias [count] or null, y [rows, count]; all without gaps. 0, or 1
// where memory is out.
template <typename Out>
static int over_panels(const Bfloat16* x, const Bfloat16* w, const Bfloat16* bias, Out* y,
                       long rows, long width, long count, int threads) {
  static thread_local std::vector<float> numbers;
  const long panels = (count + PANEL - 1) / PANEL, pairs = (width + 1) / 2;
  const size_t needed = (rows < MANY_ROWS ? rows : MANY_ROWS) * pairs * 2;
  if (numbers.size() < needed) {
    try {
      numbers = std::vector<float>();
      numbers = std::vector<float>(needed);
    } catch (const std::bad_alloc&) {
      return 1;
    }
  }
  float* all = numbers.data();
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (long from = 0; from < rows; from += MANY_ROWS) {
    const long some = rows - from < MANY_ROWS ? rows - from : MANY_ROWS;
    const long tiles = (some + TILE_ROWS - 1) / TILE_ROWS;
#pragma omp for schedule(static)
    for (long tile = 0; tile < tiles; tile++) {
      long first = some * tile / tiles, last = some * (tile + 1) / tiles;
      spread(x + (from + first) * width, all + first * pairs * 2, last - first, width);
    }
#pragma omp for schedule(static)
    for (long p = 0; p < panels; p++) {
      long first = p * PANEL, left = count - first;
      one_panel(all, w + p * pairs * 2 * PANEL, bias ? bias + first : nullptr,
                y + from * count + first, some, pairs, count, left < PANEL ? left : PANEL);
    }
  }
  return 0;
}
#endif

#if defined(__AVX512BF16__) || defined(__FMA__)
extern "C" int outrider_panels(const Bfloat16* x, const Bfloat16* w, const Bfloat16* bias,
                               Bfloat16* y, long rows, long width, long count, int threads) {
  return over_panels(x, w, bias, y, rows, width, count, threads);
}

// The same without a bias, and what comes out is not rounded.
extern "C" int outrider_panels_float(const Bfloat16* x, const Bfloat16* w, float* y, long rows,
                                     long width, long count, int threads) {
  return over_panels<float>(x, w, nullptr, y, rows, width, count, threads);
}
#endif

extern "C" const long outrider_panel = PANEL;
