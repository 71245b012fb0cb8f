// Weights of a file in panels, and their products with a few rows of float32.
//
// Rows become what ggml makes of them: numbers in bfloat16 or float16, or blocks of 32 numbers of
// eight bits with a factor in float16. So a product is ggml's but for the order of its sums, which
// does not depend on how many rows there are.

#include "rows.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <limits>

typedef unsigned short Bfloat16;
// Numbers of a weight up to which one thread is as fast as several, and rows up to which one thread
// makes them ready as fast.
constexpr long ALONE = 1 << 15, FEW = 16;

#if defined(__AVX2__) && defined(__FMA__)
extern "C" const long outrider_panel;
extern "C" int outrider_panels_float(const Bfloat16* x, const Bfloat16* w, float* y, long rows,
                                     long width, long count, int threads);

bool outrider_has_panels() { return true; }

size_t outrider_panels_bytes(long width, long count) {
  long panels = (count + outrider_panel - 1) / outrider_panel;
  return panels * outrider_panel * ((width + 1) / 2 * 2) * sizeof(Bfloat16);
}

// Hands `move` each number of a weight, null where there is none, and its place in the panels.
template <class Move>
static void each_in_panels(Bfloat16* weight, Bfloat16* panels, long width, long count, Move move) {
  long lanes = outrider_panel, pairs = (width + 1) / 2;
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < (count + lanes - 1) / lanes; panel++) {
    Bfloat16* to = panels + panel * pairs * 2 * lanes;
    for (long i = 0; i < 2 * pairs; i++)
      for (long o = 0; o < lanes; o++) {
        long output = panel * lanes + o;
        bool there = output < count && i < width;
        move(there ? weight + output * width + i : nullptr, to + i / 2 * 2 * lanes + 2 * o + i % 2);
      }
  }
}

void outrider_lay_out_panels(const void* weight, void* panels, long width, long count) {
  each_in_panels((Bfloat16*)weight, (Bfloat16*)panels, width, count,
                 [](const Bfloat16* from, Bfloat16* to) { *to = from ? *from : 0; });
}

void outrider_put_back_panels(const void* panels, void* weight, long width, long count) {
  each_in_panels((Bfloat16*)weight, (Bfloat16*)panels, width, count,
                 [](Bfloat16* to, const Bfloat16* from) {
                   if (to) *to = *from;
                 });
}

size_t outrider_panels_work(long rows, long width) { return rows * width * sizeof(Bfloat16); }

// To the nearest, of two to the even one.
static void to_bfloat16(const float* from, Bfloat16* to, long width) {
  for (long i = 0; i < width; i++) {
    unsigned bits;
    std::memcpy(&bits, from + i, sizeof bits);
    to[i] = from[i] == from[i] ? (bits + (0x7fffu + (bits >> 16 & 1))) >> 16 : 0x7fc0;
  }
}

bool outrider_panels_of_rows(const Strided* x, const void* w, float* y, char* work, long rows,
                             long width, long count, int threads) {
  auto* numbers = (Bfloat16*)work;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > FEW)
  for (long r = 0; r < rows; r++) to_bfloat16(x->row(r), numbers + r * width, width);
  return !outrider_panels_float(numbers, (const Bfloat16*)w, y, rows, width, count,
                                width * count > ALONE ? threads : 1);
}
#else
OUTRIDER_NO_KIND(panels)
#endif

// Products over panels, of any kind of number. A unit of a panel is what all its outputs have of
// some inputs; DEPTH of them stay in a core's second cache while one tile of rows after another is
// computed, of up to MANY_ROWS.

constexpr long MANY_ROWS = 96;

// One panel's outputs of rows `from..from+rows-1`; y begins at its first output of the first of them.
template <class Kind>
static void one_panel(const typename Kind::Rows& x, const char* w, float* y, long from, long rows,
                      long units, long count, long outputs) {
  alignas(64) float sums[MANY_ROWS * Kind::PANEL];
  std::memset(sums, 0, rows * Kind::PANEL * sizeof(float));
  long tiles = (rows + Kind::TILE_ROWS - 1) / Kind::TILE_ROWS;
  for (long at = 0; at < units; at += Kind::DEPTH)
    for (long t = 0; t < tiles; t++) {
      long first = rows * t / tiles, upto = rows * (t + 1) / tiles;
      Kind::TILES[upto - first - 1](x, from + first, at, units, w + at * Kind::UNIT,
                                    sums + first * Kind::PANEL, std::min(Kind::DEPTH, units - at));
    }
  for (long r = 0; r < rows; r++)
    std::memcpy(y + r * count, sums + r * Kind::PANEL, outputs * sizeof(float));
}

template <class Kind>
static void over_panels(const typename Kind::Rows& x, const void* w, float* y, long rows,
                        long units, long count, int threads) {
  constexpr long PANEL = Kind::PANEL;
  const long panels = (count + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int thread = 0; thread < threads; thread++)
    for (long from = 0; from < rows; from += MANY_ROWS)
      for (long p = panels * thread / threads; p < panels * (thread + 1) / threads; p++)
        one_panel<Kind>(x, (const char*)w + p * units * Kind::UNIT, y + from * count + p * PANEL,
                        from, std::min(MANY_ROWS, rows - from), units, count,
                        std::min<long>(PANEL, count - p * PANEL));
}

// float16: of each input in turn all outputs' numbers.

#if defined(__F16C__) && (defined(__AVX512F__) || defined(__FMA__))
namespace {
struct Halves {
#if defined(__AVX512F__)
  typedef __m512 Vector;
  static constexpr int LANES = 16, TILE_ROWS = 12;
  static Vector load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Vector numbers) { _mm512_storeu_ps(to, numbers); }
  static Vector halves(const char* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
  }
  static Vector plus(Vector sum, Vector a, float b) {
    return _mm512_fmadd_ps(a, _mm512_set1_ps(b), sum);
  }
#else
  typedef __m256 Vector;
  static constexpr int LANES = 8, TILE_ROWS = 6;
  static Vector load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Vector numbers) { _mm256_storeu_ps(to, numbers); }
  static Vector halves(const char* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
  }
  static Vector plus(Vector sum, Vector a, float b) {
    return _mm256_fmadd_ps(a, _mm256_set1_ps(b), sum);
  }
#endif
  static constexpr int VECTORS = 2, PANEL = LANES * VECTORS;
  static constexpr long UNIT = 2 * PANEL, DEPTH = 2048;
  typedef const float* Rows;

  template <int ROWS>
  static void tile(const Rows& x, long row, long first, long width, const char* w, float* sums,
                   long depth) {
    Vector kept[ROWS][VECTORS];
#pragma GCC unroll 64
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
      for (int v = 0; v < VECTORS; v++) kept[r][v] = load(sums + r * PANEL + v * LANES);
    const float* numbers = x + row * width + first;
    for (long i = 0; i < depth; i++, w += UNIT) {
      Vector weights[VECTORS];
#pragma GCC unroll 64
      for (int v = 0; v < VECTORS; v++) weights[v] = halves(w + v * 2 * LANES);
#pragma GCC unroll 64
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
        for (int v = 0; v < VECTORS; v++)
          kept[r][v] = plus(kept[r][v], weights[v], numbers[r * width + i]);
    }
#pragma GCC unroll 64
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
      for (int v = 0; v < VECTORS; v++) store(sums + r * PANEL + v * LANES, kept[r][v]);
  }

  typedef void (*Tile)(const Rows&, long, long, long, const char*, float*, long);
  static constexpr Tile TILES[] = {
      tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>,
#if defined(__AVX512F__)
      tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>,
#endif
  };
};
}  // namespace

bool outrider_has_halves() { return true; }

size_t outrider_halves_bytes(long width, long count) {
  return (count + Halves::PANEL - 1) / Halves::PANEL * width * Halves::UNIT;
}

template <class Move>
static void each_in_halves(unsigned short* weight, unsigned short* panels, long width, long count,
                           Move move) {
  constexpr long PANEL = Halves::PANEL;
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < (count + PANEL - 1) / PANEL; panel++)
    for (long i = 0; i < width; i++)
      for (long o = 0; o < PANEL; o++) {
        long output = panel * PANEL + o;
        move(output < count ? weight + output * width + i : nullptr,
             panels + (panel * width + i) * PANEL + o);
      }
}

void outrider_lay_out_halves(const void* weight, void* panels, long width, long count) {
  each_in_halves((unsigned short*)weight, (unsigned short*)panels, width, count,
                 [](const unsigned short* from, unsigned short* to) { *to = from ? *from : 0; });
}

void outrider_put_back_halves(const void* panels, void* weight, long width, long count) {
  each_in_halves((unsigned short*)weight, (unsigned short*)panels, width, count,
                 [](unsigned short* to, const unsigned short* from) {
                   if (to) *to = *from;
                 });
}

size_t outrider_halves_work(long rows, long width) { return rows * width * sizeof(float); }

bool outrider_halves_of_rows(const Strided* x, const void* w, float* y, char* work, long rows,
                             long width, long count, int threads) {
  auto* numbers = (float*)work;
  if (width * count <= ALONE) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > FEW)
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < width; i++)
      numbers[r * width + i] = _cvtsh_ss(_cvtss_sh(x->row(r)[i], _MM_FROUND_TO_NEAREST_INT));
  over_panels<Halves>(numbers, w, y, rows, width, count, threads);
  return true;
}
#else
OUTRIDER_NO_KIND(halves)
#endif

// Q8_0: a block is a factor and 32 numbers of eight bits. Of each block in turn all outputs' factors,
// and then, four inputs at a time, all outputs' numbers plus 128: an instruction multiplies numbers
// without a sign with such that have one.

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__F16C__)
namespace {
struct Blocks {
  static constexpr int BLOCK = 32, LANES = 16, VECTORS = 2, PANEL = LANES * VECTORS, TILE_ROWS = 6;
  // As many bytes of a block of a panel as ggml has for them.
  static constexpr long UNIT = PANEL * (2 + BLOCK), DEPTH = 64;

  // Of each block the numbers, its factor, and what the weights' 128 add, to be taken off.
  struct Rows {
    int8_t* numbers;
    float* factors;
    int* offs;
  };

  static void ready(const float* from, int8_t* numbers, float* factors, int* offs, long blocks) {
    for (long b = 0; b < blocks; b++, from += BLOCK, numbers += BLOCK) {
      __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + LANES);
      float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
      factors[b] = _cvtsh_ss(_cvtss_sh(most / 127.0f, _MM_FROUND_TO_NEAREST_INT));
      if (_mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q) || most > std::numeric_limits<float>::max()) {
        // What is no number stays none; the greatest of them would be another one.
        factors[b] = std::numeric_limits<float>::quiet_NaN();
        low = high = _mm512_setzero_ps();
        most = 0.0f;
      }
      __m512 scale = _mm512_set1_ps(most != 0.0f ? 127.0f / most : 0.0f);
      __m512i some = _mm512_cvtps_epi32(_mm512_mul_ps(low, scale));
      __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(high, scale));
      _mm_storeu_si128((__m128i*)numbers, _mm512_cvtsepi32_epi8(some));
      _mm_storeu_si128((__m128i*)(numbers + LANES), _mm512_cvtsepi32_epi8(rest));
      offs[b] = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(some, rest));
    }
  }

  template <int ROWS>
  static void tile(const Rows& x, long row, long block, long blocks, const char* w, float* sums,
                   long depth) {
    __m512 kept[ROWS][VECTORS];
    const int8_t* numbers[ROWS];
    const long first = row * blocks + block;
#pragma GCC unroll 64
    for (int r = 0; r < ROWS; r++) {
      numbers[r] = x.numbers + (first + r * blocks) * BLOCK;
#pragma GCC unroll 64
      for (int v = 0; v < VECTORS; v++) kept[r][v] = _mm512_load_ps(sums + r * PANEL + v * LANES);
    }
    for (long b = 0; b < depth; b++, w += UNIT) {
      __m512i whole[ROWS][VECTORS];
#pragma GCC unroll 64
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
        for (int v = 0; v < VECTORS; v++)
          whole[r][v] = _mm512_set1_epi32(x.offs[first + r * blocks + b]);
#pragma GCC unroll 64
      for (int four = 0; four < BLOCK / 4; four++) {
        __m512i weights[VECTORS];
#pragma GCC unroll 64
        for (int v = 0; v < VECTORS; v++)
          weights[v] = _mm512_loadu_si512(w + 2 * PANEL + (four * VECTORS + v) * 64);
#pragma GCC unroll 64
        for (int r = 0; r < ROWS; r++) {
          int inputs;
          std::memcpy(&inputs, numbers[r] + b * BLOCK + 4 * four, sizeof inputs);
#pragma GCC unroll 64
          for (int v = 0; v < VECTORS; v++)
            whole[r][v] = _mm512_dpbusd_epi32(whole[r][v], weights[v], _mm512_set1_epi32(inputs));
        }
      }
#pragma GCC unroll 64
      for (int v = 0; v < VECTORS; v++) {
        __m512 factor = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(w + v * 2 * LANES)));
#pragma GCC unroll 64
        for (int r = 0; r < ROWS; r++) {
          __m512 both = _mm512_mul_ps(factor, _mm512_set1_ps(x.factors[first + r * blocks + b]));
          kept[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[r][v]), both, kept[r][v]);
        }
      }
    }
#pragma GCC unroll 64
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
      for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + r * PANEL + v * LANES, kept[r][v]);
  }

  typedef void (*Tile)(const Rows&, long, long, long, const char*, float*, long);
  static constexpr Tile TILES[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};
};
}  // namespace

bool outrider_has_blocks() { return true; }

size_t outrider_blocks_bytes(long width, long count) {
  return (count + Blocks::PANEL - 1) / Blocks::PANEL * (width / Blocks::BLOCK) * Blocks::UNIT;
}

struct Block {
  unsigned short factor;
  uint8_t numbers[Blocks::BLOCK];
};

// Hands `move` each block of a weight, null where there is none, its factor's place in the panels,
// and that of its first four numbers; the next four lie 4 PANEL bytes behind.
template <class Move>
static void each_block(Block* weight, char* panels, long width, long count, Move move) {
  constexpr long PANEL = Blocks::PANEL;
  const long blocks = width / Blocks::BLOCK;
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < (count + PANEL - 1) / PANEL; panel++)
    for (long b = 0; b < blocks; b++) {
      char* to = panels + (panel * blocks + b) * Blocks::UNIT;
      for (long o = 0; o < PANEL; o++) {
        long output = panel * PANEL + o;
        move(output < count ? weight + output * blocks + b : nullptr, (unsigned short*)to + o,
             (uint8_t*)to + 2 * PANEL + 4 * o);
      }
    }
}

static long place(long i) { return i / 4 * 4 * Blocks::PANEL + i % 4; }

void outrider_lay_out_blocks(const void* weight, void* panels, long width, long count) {
  each_block((Block*)weight, (char*)panels, width, count,
             [](const Block* from, unsigned short* factor, uint8_t* numbers) {
               *factor = from ? from->factor : 0;
               for (long i = 0; i < Blocks::BLOCK; i++)
                 numbers[place(i)] = (from ? from->numbers[i] : 0) ^ 0x80;
             });
}

void outrider_put_back_blocks(const void* panels, void* weight, long width, long count) {
  each_block((Block*)weight, (char*)panels, width, count,
             [](Block* to, const unsigned short* factor, const uint8_t* numbers) {
               if (to == nullptr) return;
               to->factor = *factor;
               for (long i = 0; i < Blocks::BLOCK; i++) to->numbers[i] = numbers[place(i)] ^ 0x80;
             });
}

size_t outrider_blocks_work(long rows, long width) {
  return rows * width + rows * (width / Blocks::BLOCK) * (sizeof(float) + sizeof(int));
}

bool outrider_blocks_of_rows(const Strided* x, const void* w, float* y, char* work, long rows,
                             long width, long count, int threads) {
  const long blocks = width / Blocks::BLOCK;
  auto* factors = (float*)(work + rows * width);
  const Blocks::Rows ready = {(int8_t*)work, factors, (int*)(factors + rows * blocks)};
  if (width * count <= ALONE) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > FEW)
  for (long r = 0; r < rows; r++)
    Blocks::ready(x->row(r), ready.numbers + r * width, factors + r * blocks,
                  ready.offs + r * blocks, blocks);
  over_panels<Blocks>(ready, w, y, rows, blocks, count, threads);
  return true;
}
#else
OUTRIDER_NO_KIND(blocks)
#endif
