// The sums of panels.h, tile by tile.

#include "panels.h"

#if defined(OUTRIDER_VECTORS)
namespace panels {

#if defined(OUTRIDER_PAIRS)
// An instruction multiplies a pair of inputs with those of 16 outputs: rows are read as they lie.
constexpr long TILE_ROWS = 14;
// Inputs of a panel that stay in a core's second cache while one tile of rows after another reads
// them; rows of a tile whose weights come by themselves; and inputs that a weight is asked for ahead
// of its use by a tile of more.
constexpr long DEPTH = 4096, FEW_ROWS = 4, INPUTS_AHEAD = 128;

static inline __m512bh pair_in_all_lanes(const Bfloat16* from, int numbers) {
  int both = 0;
  std::memcpy(&both, from, numbers * sizeof(Bfloat16));
  return (__m512bh)_mm512_set1_epi32(both);
}

// Where rows lie multiples of so many numbers apart, what a tile reads of them at a time is all in one
// set of a core's first cache, of eight ways: tiles of up to ten rows were seen not to wait for it.
constexpr long ALIASED = 2048, ALIASED_ROWS = 10;
static_assert(ALIASED_ROWS <= TILE_ROWS);
static long tiles_of(long rows, long width) {
  const long most = width % ALIASED ? TILE_ROWS : ALIASED_ROWS;
  return (rows + most - 1) / most;
}

// What is asked for: nothing; weights that are read soon, into the second cache; or a share of the
// block that comes next, into that or the first.
enum Ahead { NONE, SOON, SECOND, FIRST };

// sums[r, o] = or += sum over i of w[o, i] x[r, i], in the order of i. Meanwhile `next` is asked for,
// `step` bytes with each pair, and from input `turn` on what begins at `after`.
template <int ROWS, Ahead AHEAD_TO>
static void panel_tile(const Bfloat16* x, long width, const Bfloat16* w, float* sums, bool fresh,
                long depth, const char* next, long step, long turn, const char* after) {
  __m512 kept[ROWS][VECTORS];
#pragma GCC unroll 64
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
    for (int v = 0; v < VECTORS; v++)
      kept[r][v] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * PANEL + v * LANES);
  auto add = [&](long at, int numbers) __attribute__((always_inline)) {
    __m512bh weights[VECTORS];
#pragma GCC unroll 64
    for (int v = 0; v < VECTORS; v++)
      weights[v] = (__m512bh)_mm512_loadu_si512(w + at * PANEL + v * 2 * LANES);
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
    if constexpr (AHEAD_TO == SOON) {
      if (at == turn) next = after;
      __builtin_prefetch(next + LINE, 0, 2);
    }
    if constexpr (AHEAD_TO != NONE) __builtin_prefetch(next, 0, AHEAD_TO == FIRST ? 3 : 2);
    add(at, 2);
  }
  if (at < depth) add(at, 1);
#pragma GCC unroll 64
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
    for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + r * PANEL + v * LANES, kept[r][v]);
}

typedef void (*PanelTile)(const Bfloat16*, long, const Bfloat16*, float*, bool, long, const char*,
                          long, long, const char*);
template <Ahead TO>
static constexpr PanelTile PANEL_TILES[TILE_ROWS] = {
    panel_tile<1, TO>,  panel_tile<2, TO>,  panel_tile<3, TO>,  panel_tile<4, TO>,
    panel_tile<5, TO>,  panel_tile<6, TO>,  panel_tile<7, TO>,  panel_tile<8, TO>,
    panel_tile<9, TO>,  panel_tile<10, TO>, panel_tile<11, TO>, panel_tile<12, TO>,
    panel_tile<13, TO>, panel_tile<14, TO>};

size_t room(long, long) { return 0; }
const Ready* ready(const Bfloat16* x, Ready*, long, long) { return x; }
const Ready* ready_together(const Bfloat16* x, Ready*, long, long) { return x; }

void add_up(const Ready* x, const Bfloat16* w, float* sums, long rows, long width,
            const Bfloat16* after) {
  long tiles = tiles_of(rows, width);
  // A single tile reads from memory. Several compute from a cache, and memory would idle: each asks
  // for its share of the block that comes next. Two find time to have it in the second cache, more in
  // the first.
  const PanelTile* run = rows <= FEW_ROWS ? PANEL_TILES<NONE>
                         : tiles == 1     ? PANEL_TILES<SOON>
                         : tiles == 2     ? PANEL_TILES<SECOND>
                                          : PANEL_TILES<FIRST>;
  for (long at = 0; at < width; at += DEPTH)
    for (long tile = 0; tile < tiles; tile++) {
      long from = rows * tile / tiles, upto = rows * (tile + 1) / tiles;
      long depth = smaller(width - at, DEPTH), step = 4 * PANEL / tiles;
      const Bfloat16* block = w + at * PANEL;
      const Bfloat16* then = at + depth < width ? block + depth * PANEL : after;
      // From here on what is that far ahead is behind this block.
      const long turn = depth > INPUTS_AHEAD ? (depth - INPUTS_AHEAD) / 2 * 2 : 0;
      const char* next = tiles == 1 ? (const char*)(block + INPUTS_AHEAD * PANEL)
                                    : (const char*)then + depth / 2 * step * tile;
      run[upto - from - 1](x + from * width + at, width, block, sums + from * PANEL, at == 0, depth,
                           next, step, turn, (const char*)then);
    }
}
#else
// Without such instructions both numbers of a pair become float32, which takes a shift or a mask, and
// are multiplied one after the other. A tile's rows are made ready as float32, pairs one after
// another, each with all rows' two numbers: [pair][row][2].
constexpr long TILE_ROWS = LANES == 16 ? 12 : 6;
// Inputs of a panel that stay in a core's first cache while one tile of rows after another reads
// them, and bytes that a weight is asked for ahead of its use.
constexpr long DEPTH = 1024, BYTES_AHEAD = 1024;

typedef unsigned Bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
constexpr unsigned UPPER = 0xffff0000u;

static long tiles_of(long rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

static inline float wide(Bfloat16 number) {
  unsigned bits = unsigned(number) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

static void spread(const Bfloat16* x, float* to, long rows, long width) {
  for (long at = 0; at < width; at += 2)
    for (long r = 0; r < rows; r++, to += 2) {
      to[0] = wide(x[r * width + at]);
      to[1] = at + 1 < width ? wide(x[r * width + at + 1]) : 0.0f;
    }
}

// sums[r, o] = or += sum over i of w[o, i] x[r, i], in the order of i.
template <int ROWS>
static void panel_tile(const float* x, const Bfloat16* w, float* sums, bool fresh, long pairs) {
  Vector kept[ROWS][VECTORS];
#pragma GCC unroll 64
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
    for (int v = 0; v < VECTORS; v++)
      kept[r][v] = fresh ? vectors::all(0.0f) : vectors::load(sums + r * PANEL + v * LANES);
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
        Vector input = vectors::all(x[2 * r + which]);
#pragma GCC unroll 64
        for (int v = 0; v < VECTORS; v++)
          kept[r][v] = vectors::fused(weight[v], input, kept[r][v]);
      }
    }
  }
#pragma GCC unroll 64
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 64
    for (int v = 0; v < VECTORS; v++) vectors::store(sums + r * PANEL + v * LANES, kept[r][v]);
}

typedef void (*PanelTile)(const float*, const Bfloat16*, float*, bool, long);
static constexpr PanelTile PANEL_TILES[] = {
    panel_tile<1>, panel_tile<2>, panel_tile<3>, panel_tile<4>,  panel_tile<5>,  panel_tile<6>,
    panel_tile<7>, panel_tile<8>, panel_tile<9>, panel_tile<10>, panel_tile<11>, panel_tile<12>};

size_t room(long rows, long width) { return rows * ((width + 1) / 2 * 2); }

static void ready_tile(const Bfloat16* x, Ready* to, long rows, long width, long tile) {
  long first = rows * tile / tiles_of(rows), last = rows * (tile + 1) / tiles_of(rows);
  spread(x + first * width, to + room(first, width), last - first, width);
}
const Ready* ready(const Bfloat16* x, Ready* to, long rows, long width) {
  for (long tile = 0; tile < tiles_of(rows); tile++) ready_tile(x, to, rows, width, tile);
  return to;
}
const Ready* ready_together(const Bfloat16* x, Ready* to, long rows, long width) {
#pragma omp for schedule(static)
  for (long tile = 0; tile < tiles_of(rows); tile++) ready_tile(x, to, rows, width, tile);
  return to;
}

void add_up(const Ready* x, const Bfloat16* w, float* sums, long rows, long width,
            const Bfloat16*) {
  long tiles = tiles_of(rows), pairs = (width + 1) / 2;
  for (long at = 0; at < pairs; at += DEPTH / 2)
    for (long tile = 0; tile < tiles; tile++) {
      long from = rows * tile / tiles, some = rows * (tile + 1) / tiles - from;
      PANEL_TILES[some - 1](x + 2 * (from * pairs + at * some), w + at * 2 * PANEL,
                            sums + from * PANEL, at == 0, smaller(pairs - at, DEPTH / 2));
    }
}
#endif

}  // namespace panels
#endif
