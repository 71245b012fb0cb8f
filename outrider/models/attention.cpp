// Attention over cached keys and values, which are read where they lie.
//
// Scores and sums are float32 whatever is cached, and so are weights but where they multiply pairs
// of bfloat16 numbers. What a row becomes does not depend, to the bit, on the rows beside it, nor on
// where what it sees begins: each query's sums run over its keys one after another, and a hidden key
// weighs exactly zero, which changes no sum of finite values.

#include "vectors.h"

#if defined(OUTRIDER_VECTORS)
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

#include "attention.h"

namespace {

using namespace vectors;

// Heads are a multiple of so many numbers wide, and scores are summed of so many keys at a time.
constexpr int WIDTH = 16, KEYS = 16;

// For each width of vectors what is done with one, and how much at a time, so that sums stay in
// registers: queries whose scores are summed (SCORED), vectors of values (VECTORS) and queries that
// weigh them, whose weights are summed along (COUNTED) or were before (WEIGHED). Keys whose values
// stay in a core's cache while one query after another weighs them (AT_A_TIME), and how many keys
// AHEAD of their use values are asked for.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int SCORED = 8, COUNTED = 4, WEIGHED = 4, VECTORS = 4;
constexpr int64_t AT_A_TIME = 256, AHEAD = 8;

// Sixteen vectors of 16 numbers, rows for columns.
inline void transpose(Vector* rows) {
  Vector pairs[LANES], fours[LANES];
  for (int i = 0; i < LANES; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; j++) {
      __m512d low = _mm512_castps_pd(pairs[i + j]), high = _mm512_castps_pd(pairs[i + j + 2]);
      fours[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      fours[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  // fours[4 b + c] has in its quarter q column 4 q + c of rows 4 b .. 4 b + 3.
  for (int c = 0; c < 4; c++) {
    Vector a = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0x88);
    Vector b = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0xdd);
    Vector d = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0x88);
    Vector e = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0xdd);
    rows[c] = _mm512_shuffle_f32x4(a, d, 0x88);
    rows[4 + c] = _mm512_shuffle_f32x4(b, e, 0x88);
    rows[8 + c] = _mm512_shuffle_f32x4(a, d, 0xdd);
    rows[12 + c] = _mm512_shuffle_f32x4(b, e, 0xdd);
  }
}
#else
constexpr int SCORED = 6, COUNTED = 4, WEIGHED = 6, VECTORS = 2;
constexpr int64_t AT_A_TIME = 32, AHEAD = 32;

inline void transpose(Vector* rows) {
  Vector fours[LANES];
  for (int i = 0; i < 4; i++) {
    // fours[i] has the first four numbers of rows i and i + 4, fours[i + 4] the others.
    fours[i] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20);
    fours[i + 4] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31);
  }
  for (int i = 0; i < LANES; i += 4) {
    Vector a = _mm256_unpacklo_ps(fours[i], fours[i + 1]);
    Vector b = _mm256_unpackhi_ps(fours[i], fours[i + 1]);
    Vector c = _mm256_unpacklo_ps(fours[i + 2], fours[i + 3]);
    Vector d = _mm256_unpackhi_ps(fours[i + 2], fours[i + 3]);
    rows[i] = _mm256_shuffle_ps(a, c, 0x44);
    rows[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    rows[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    rows[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
}

inline void turn(const Bfloat16* const* keys, float* to) {
  // Two numbers at a time, as if they were one.
  Vector pairs[LANES];
  for (int k = 0; k < LANES; k++) pairs[k] = load((const float*)keys[k]);
  transpose(pairs);
  const Vector odd = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff0000));
  for (int k = 0; k < LANES; k++) {
    __m256i even = _mm256_slli_epi32(_mm256_castps_si256(pairs[k]), 16);
    store(to + 2 * k * KEYS, _mm256_castsi256_ps(even));
    store(to + (2 * k + 1) * KEYS, _mm256_and_ps(pairs[k], odd));
  }
}
#endif

// Values, which are float32; weights, which are stored as the k-th vector of a query's; their sum.
template <int WIDE, typename T>
inline void load_values(const T* from, const T*, Vector* to) {
#pragma GCC unroll 16
  for (int v = 0; v < WIDE; v++) to[v] = load(from + v * LANES);
}
template <int KEYS_A_WORD>
inline void store_weights(float* to, int64_t k, Vector weights) {
  store(to + k * LANES, weights);
}
template <int KEYS_A_WORD>
inline Vector counted(Vector weights, Vector total) {
  return total + weights;
}

// Where the processor multiplies pairs of bfloat16 numbers, scores are summed of those: PAIR numbers
// are one word of a key or query, and what is multiplied is exact there too. Values are weighed so
// by pairs of keys, with weights that are rounded first and counted as they are then. The processor
// adds a pair's second product first, so the earlier key's stands there: sums run in keys' order.
#if defined(OUTRIDER_PAIRS)
template <typename T>
constexpr int PAIR = std::is_same<T, Bfloat16>::value ? 2 : 1;

inline Vector paired(Vector a, Vector b, Vector sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}

template <int WIDE>
inline void load_values(const Bfloat16* first, const Bfloat16* second, Vector* to) {
  // One number of the second, then one of the first.
  const __m512i low = _mm512_set_epi16(15, 47, 14, 46, 13, 45, 12, 44, 11, 43, 10, 42, 9, 41, 8, 40,
                                       7, 39, 6, 38, 5, 37, 4, 36, 3, 35, 2, 34, 1, 33, 0, 32);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  if constexpr (WIDE == 1) {
    __m512i a = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first));
    __m512i b = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)second));
    to[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b));
    return;
  }
#pragma GCC unroll 16
  for (int v = 0; v + 1 < WIDE; v += 2) {
    __m512i a = _mm512_loadu_si512(first + v * LANES), b = _mm512_loadu_si512(second + v * LANES);
    to[v] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b));
    to[v + 1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, high, b));
  }
}
template <>
inline void store_weights<2>(float* to, int64_t k, Vector weights) {
  __m256i pairs = (__m256i)_mm512_cvtneps_pbh(weights);
  _mm256_storeu_si256((__m256i*)(to + k * LANES / 2), _mm256_rol_epi32(pairs, 16));
}
template <>
inline Vector counted<2>(Vector weights, Vector total) {
  return paired(weights, _mm512_castsi512_ps(_mm512_set1_epi32(0x3f803f80)), total);
}
#else
template <typename T>
constexpr int PAIR = 1;

inline Vector paired(Vector a, Vector b, Vector sum) { return fused(a, b, sum); }
#endif

// What stands for the values of a key after the last one.
template <typename T>
constexpr T NOTHING[VECTORS * LANES] = {};

// Bytes that come from memory together.
constexpr int LINE = 64;
// Scores that are kept at a time, in a core's second cache; but of so many queries at least.
constexpr int64_t KEPT = 1 << 18, LEAST = 32;
// Numbers of a thread's scratch that stay for its next call.
constexpr size_t SCRATCH = 1 << 21;

// Keeps it in a register: the compiler would load it again wherever it is used.
inline void hold(Vector& x) { asm("" : "+v"(x)); }

// Asks for numbers that are used soon.
template <typename T>
inline void fetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += LINE / sizeof(T)) __builtin_prefetch(from + i);
}

// The next WIDTH numbers of LANES keys: of one number after another those of all keys.
template <typename T>
inline void turn(const T* const* keys, float* to) {
  for (int d = 0; d < WIDTH; d += LANES) {
    Vector block[LANES];
    for (int k = 0; k < LANES; k++) block[k] = load(keys[k] + d);
    transpose(block);
    for (int k = 0; k < LANES; k++) store(to + (d + k) * KEYS, block[k]);
  }
}

// All words of KEYS keys: of one word after another those of all keys.
template <typename T>
inline void turn_all(const T* const* keys, int64_t words, float* to) {
#if defined(OUTRIDER_PAIRS)
  if constexpr (PAIR<T> == 2) {
    for (int64_t d = 0; d < words; d += LANES) {
      const int64_t now = words - d < LANES ? words - d : LANES;
      const __mmask16 there = (__mmask16)((1u << now) - 1);
      Vector block[LANES];
      for (int k = 0; k < LANES; k++)
        block[k] = _mm512_maskz_loadu_ps(there, (const float*)keys[k] + d);
      transpose(block);
      for (int64_t k = 0; k < now; k++) store(to + (d + k) * KEYS, block[k]);
    }
    return;
  }
#endif
  for (int64_t d = 0; d < words; d += WIDTH) {
    const T* here[KEYS];
    for (int k = 0; k < KEYS; k++) here[k] = keys[k] + d;
    for (int k = 0; k < KEYS; k += LANES) turn(here + k, to + d * KEYS + k);
  }
}

inline Vector capped(Vector x, float cap) {
  const Vector one = all(1.0f), y = x / all(cap);
  // tanh |y| = (1 - e) / (1 + e) with e = exp(-2 |y|).
  Vector e = exponential(all(-2.0f) * magnitude(y));
  return with_sign((one - e) / (one + e) * all(cap), y);
}

// Scores of KEYS keys that were turned. Among other code its sums would not keep their registers.
template <int QUERIES, bool PAIRS>
__attribute__((noinline)) void scores_of(const float* query, const float* keys, int64_t words,
                                         float scaling, float* to, int64_t stride) {
  constexpr int WIDE = KEYS / LANES;
  Vector sums[QUERIES][WIDE];
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 16
    for (int k = 0; k < WIDE; k++) sums[q][k] = all(0.0f);
  for (int64_t d = 0; d < words; d++) {
    Vector key[WIDE];
#pragma GCC unroll 16
    for (int k = 0; k < WIDE; k++) {
      key[k] = load(keys + d * KEYS + k * LANES);
      hold(key[k]);
    }
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 16
      for (int k = 0; k < WIDE; k++) {
        const Vector own = all(query[q * words + d]);
        sums[q][k] = PAIRS ? paired(own, key[k], sums[q][k]) : fused(own, key[k], sums[q][k]);
      }
  }
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 16
    for (int k = 0; k < WIDE; k++) store(to + q * stride + k * LANES, sums[q][k] * all(scaling));
}

// Adds weighed values to `out`, and where it COUNTS the weights to `totals`. Values of as many keys
// as are `ahead` are asked for, AHEAD keys on. Weights of PAIR keys are one word.
template <int QUERIES, int WIDE, bool COUNTS, typename T>
__attribute__((noinline)) void weighed(const float* weights, int64_t stride, const T* values,
                                       int64_t value_width, const int64_t* places, int64_t count,
                                       int64_t ahead, float* out, float* totals) {
  Vector sums[QUERIES][WIDE], total[QUERIES];
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++) total[q] = all(COUNTS ? totals[q] : 0.0f);
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 16
    for (int v = 0; v < WIDE; v++) sums[q][v] = load(out + q * value_width + v * LANES);
  for (int64_t t = 0; t < count; t += PAIR<T>) {
    const bool next = PAIR<T> == 2 && t + 1 < count;
    Vector value[WIDE];
    load_values<WIDE>(values + places[t] * value_width,
                      next ? values + places[t + 1] * value_width : NOTHING<T>, value);
#pragma GCC unroll 16
    for (int v = 0; v < WIDE; v++) hold(value[v]);
    for (int64_t k = t; k < t + PAIR<T>; k++)
      if (k < ahead) fetch(values + places[k + AHEAD] * value_width, WIDE * LANES);
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; q++) {
      Vector weight = all(weights[q * stride + t / PAIR<T>]);
      if (COUNTS) total[q] = counted<PAIR<T>>(weight, total[q]);
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++)
        sums[q][v] = PAIR<T> == 2 ? paired(weight, value[v], sums[q][v])
                                  : fused(weight, value[v], sums[q][v]);
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 16
    for (int v = 0; v < WIDE; v++) store(out + q * value_width + v * LANES, sums[q][v]);
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++)
    if (COUNTS) totals[q] = first(total[q]);
}

template <int MOST, typename Run>
inline void exactly(int64_t count, Run run) {
  if (count == MOST)
    run(std::integral_constant<int, MOST>());
  else if constexpr (MOST > 1)
    exactly<MOST - 1>(count, run);
}

// Calls `run` with the first query and, as a constant, the number of those taken together: at most
// MOST, and all but equally many each time.
template <int MOST, typename Run>
inline void in_turn(int64_t queries, Run run) {
  const int64_t turns = (queries + MOST - 1) / MOST;
  for (int64_t turn = 0; turn < turns; turn++) {
    const int64_t q = queries * turn / turns;
    exactly<MOST>(queries * (turn + 1) / turns - q, [&](auto number) { run(q, number); });
  }
}

// Queries `from` to `upto - 1` of one key head of a span: row by row, each with the key head's
// query heads. False where memory is out.
template <typename T>
bool some(const Layer& layer, const Span& span, int64_t group, int64_t from, int64_t upto) {
  const int64_t per_group = layer.heads / layer.groups, queries = upto - from;
  const int64_t width = layer.width, value_width = layer.value_width, words = width / PAIR<T>;
  const int64_t count = span.count - span.first, padded = (count + KEYS - 1) / KEYS * KEYS;
  static thread_local std::vector<float> scratch;
  const size_t needed = queries * (width + padded + value_width + 2) + width * KEYS + LINE;
  if (scratch.size() < needed) {
    try {
      scratch = std::vector<float>();
      scratch = std::vector<float>(needed);
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  float* keys = (float*)(((uintptr_t)scratch.data() + LINE - 1) / LINE * LINE);
  float* query = keys + width * KEYS;
  float* scores = query + queries * width;
  float* sums = scores + queries * padded;
  // What all weights of a query come to, its sink first; and its highest score.
  float *totals = sums + queries * value_width, *tops = totals + queries;

  for (int64_t q = 0; q < queries; q++) {
    const int64_t head = group * per_group + (from + q) % per_group;
    const int64_t row = span.row + (from + q) / per_group;
    const T* own = (const T*)layer.query + head * layer.query_head + row * layer.query_row;
    if constexpr (PAIR<T> == 2)
      std::memcpy(query + q * words, own, width * sizeof(T));
    else
      for (int64_t d = 0; d < width; d += LANES) store(query + q * words + d, load(own + d));
  }

  const int64_t* places = span.places + span.first;
  const T* cached = (const T*)layer.cached_keys + group * layer.cached_key_head;
  for (int64_t t = 0; t < padded; t += KEYS) {
    const T *here[KEYS], *next[KEYS];
    for (int k = 0; k < KEYS; k++) {
      here[k] = cached + places[t + k < count ? t + k : count - 1] * width;
      next[k] = cached + places[t + KEYS + k < count ? t + KEYS + k : count - 1] * width;
    }
    turn_all(here, words, keys);
    // Memory gives sooner what lies together, and while something is computed.
    in_turn<SCORED>(queries, [&](int64_t q, auto number) {
      for (int64_t k = KEYS * q / queries; k < KEYS * (q + number) / queries; k++)
        fetch(next[k], width);
      scores_of<number(), PAIR<T> == 2>(query + q * words, keys, words, layer.scaling,
                                        scores + q * padded + t, padded);
    });
  }

  const float lowest = -std::numeric_limits<float>::infinity();
  for (int64_t q = 0; q < queries; q++) {
    float* own = scores + q * padded;
    if (layer.softcap)
      for (int64_t t = 0; t < padded; t += LANES)
        store(own + t, capped(load(own + t), layer.softcap));
    for (int64_t t = count; t < padded; t++) own[t] = lowest;
    if (span.hidden) {
      const int64_t tail = span.count - span.masked;
      const uint8_t* hidden = span.hidden + (from + q) / per_group * tail;
      float* last = own + span.masked - span.first;
      for (int64_t t = 0; t < tail; t++)
        if (hidden[t]) last[t] = lowest;
    }
    // A sink takes part in the sum and has no value: attention to nothing.
    const int64_t head = group * per_group + (from + q) % per_group;
    const Vector sink = all(layer.sinks ? layer.sinks[head] : lowest);
    Vector top = sink;
    for (int64_t t = 0; t < padded; t += LANES) top = larger(top, load(own + t));
    tops[q] = largest(top);
    totals[q] = first(exponential(sink - all(tops[q])));
  }

  const T* values = (const T*)layer.cached_values + group * layer.cached_value_head;
  std::memset(sums, 0, queries * value_width * sizeof(float));
  for (int64_t t = 0; t < count; t += AT_A_TIME) {
    const int64_t now = count - t < AT_A_TIME ? count - t : AT_A_TIME;
    const int64_t rest = count - t - AHEAD, ahead = rest < now ? rest : now;
    for (int64_t q = 0; q < queries; q++) {
      float* own = scores + q * padded + t;
      const Vector top = all(tops[q]);
      for (int64_t k = 0; k < now; k += LANES) {
        store_weights<PAIR<T>>(own, k / LANES, exponential(load(own + k) - top));
        if (k * sizeof(float) % LINE == 0) __builtin_prefetch(own + AT_A_TIME + k);
      }
    }
    for (int64_t e = 0; e < value_width;) {
      const bool wide = e + VECTORS * LANES <= value_width;
      const auto add = [&](int64_t q, auto number, auto counts) {
        constexpr int QUERIES = number();
        auto run = wide ? weighed<QUERIES, VECTORS, counts(), T>
                        : weighed<QUERIES, WIDTH / LANES, counts(), T>;
        run(scores + q * padded + t, padded, values + e, value_width, places + t, now,
            q ? 0 : ahead, sums + q * value_width + e, totals + q);
      };
      // All weights are counted once.
      if (e)
        in_turn<WEIGHED>(queries, [&](auto q, auto number) { add(q, number, std::false_type()); });
      else
        in_turn<COUNTED>(queries, [&](auto q, auto number) { add(q, number, std::true_type()); });
      e += wide ? VECTORS * LANES : WIDTH;
    }
  }
  for (int64_t q = 0; q < queries; q++) {
    const int64_t head = group * per_group + (from + q) % per_group;
    const int64_t row = span.row + (from + q) / per_group;
    T* to = (T*)layer.out + (row * layer.heads + head) * value_width;
    for (int64_t e = 0; e < value_width; e += LANES)
      store(to + e, load(sums + q * value_width + e) / all(totals[q]));
  }
  if (scratch.size() > SCRATCH) scratch = std::vector<float>();
  return true;
}

template <typename T>
bool attend(const Layer& layer, const Span* spans, int64_t num_spans, int threads) {
  const int64_t per_group = layer.heads / layer.groups, tasks = num_spans * layer.groups;
  if (!tasks) return true;
  bool fits = true;
  // Where there are fewer key heads than threads each one's queries are shared out.
  const int64_t shares = tasks < threads ? (threads + tasks - 1) / tasks : 1;
  const auto write = [&](int64_t task) {
    const Span& span = spans[task / layer.groups];
    const int64_t group = task % layer.groups;
    const T* keys = (const T*)layer.keys + group * layer.key_head;
    const T* values = (const T*)layer.values + group * layer.value_head;
    for (int64_t r = 0; r < span.rows; r++) {
      const int64_t place = span.places[span.count - span.rows + r], row = span.row + r;
      std::memcpy((T*)layer.cached_keys + group * layer.cached_key_head + place * layer.width,
                  keys + row * layer.key_row, layer.width * sizeof(T));
      std::memcpy(
          (T*)layer.cached_values + group * layer.cached_value_head + place * layer.value_width,
          values + row * layer.value_row, layer.value_width * sizeof(T));
    }
  };
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    // Several threads read what is written only where they share a task: else none has to wait.
    if (shares > 1) {
#pragma omp for schedule(static)
      for (int64_t task = 0; task < tasks; task++) write(task);
    }
#pragma omp for schedule(dynamic) nowait
    for (int64_t task = 0; task < tasks * shares; task++) {
      const Span& span = spans[task / shares / layer.groups];
      const int64_t queries = span.rows * per_group, share = task % shares;
      const int64_t from = queries * share / shares, upto = queries * (share + 1) / shares;
      const int64_t kept = KEPT / (span.count - span.first + KEYS) / SCORED * SCORED;
      const int64_t step = kept > LEAST ? kept : LEAST;
      if (shares == 1) write(task);
      for (int64_t q = from; q < upto; q += step)
        if (!some<T>(layer, span, task / shares % layer.groups, q,
                     q + step < upto ? q + step : upto)) {
#pragma omp atomic write
          fits = false;
        }
    }
  }
  return fits;
}

}  // namespace

// 0, or 1 where memory is out.
extern "C" int outrider_attend(const Layer* layer, const Span* spans, int64_t num_spans,
                                int is_bfloat16, int threads) {
  return is_bfloat16 ? !attend<Bfloat16>(*layer, spans, num_spans, threads)
                     : !attend<float>(*layer, spans, num_spans, threads);
}
#endif
