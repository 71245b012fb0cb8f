// Attention over cached keys and values, which are read where they lie.
//
// Scores, weights and sums are float32 whatever is cached. What a row becomes does not depend, to
// the bit, on the rows beside it, nor on where what it sees begins: each query's sums run over its
// keys one after another, and a hidden key weighs exactly zero, which changes no sum.

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

namespace {

constexpr int LANES = 16;
// Queries whose scores are summed at a time; and queries and vectors of values.
constexpr int SCORED = 8, WEIGHED = 4, VECTORS = 4;
// Scores that are kept at a time, in a core's second cache; but of so many queries at least.
constexpr int64_t KEPT = 1 << 18, LEAST = 32;
// Numbers of a thread's scratch that stay for its next call.
constexpr size_t SCRATCH = 1 << 21;
// Keys whose values stay there while one query after another weighs them.
constexpr int64_t AT_A_TIME = 256;

typedef unsigned short Bfloat16;

inline __m512 load(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load(const Bfloat16* from) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store(float* to, __m512 value) { _mm512_storeu_ps(to, value); }
inline void store(Bfloat16* to, __m512 value) {
  // To the nearest, of two to the even one.
  __m512i bits = _mm512_castps_si512(value);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 number = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
  bits = _mm512_mask_blend_epi32(number, _mm512_set1_epi32(0x7fc00000), bits);
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}

// e^x for x <= 0, within two units in the last place; 0 for -inf.
inline __m512 exponential(__m512 x) {
  __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  power = _mm512_max_ps(power, _mm512_set1_ps(-200.0f));
  __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                     5.0000001201e-1f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(next));
  sum = _mm512_fmadd_ps(_mm512_mul_ps(rest, rest), sum, _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
  __mmask16 seen = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-150.0f), _CMP_NLE_UQ);
  return _mm512_maskz_scalef_ps(seen, sum, power);
}

inline __m512 capped(__m512 x, float cap) {
  const __m512 one = _mm512_set1_ps(1.0f), y = _mm512_div_ps(x, _mm512_set1_ps(cap));
  // tanh |y| = (1 - e) / (1 + e) with e = exp(-2 |y|).
  __m512 e = exponential(_mm512_mul_ps(_mm512_set1_ps(-2.0f), _mm512_abs_ps(y)));
  __m512 tanh = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  tanh = _mm512_mul_ps(tanh, _mm512_set1_ps(cap));
  return _mm512_mask_sub_ps(tanh, _mm512_cmp_ps_mask(y, _mm512_setzero_ps(), _CMP_LT_OQ),
                            _mm512_setzero_ps(), tanh);
}

// Sixteen vectors of 16 numbers, rows for columns.
inline void transpose(__m512* rows) {
  __m512 pairs[LANES], fours[LANES];
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
    __m512 a = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0x88);
    __m512 b = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0xdd);
    __m512 d = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0x88);
    __m512 e = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0xdd);
    rows[c] = _mm512_shuffle_f32x4(a, d, 0x88);
    rows[4 + c] = _mm512_shuffle_f32x4(b, e, 0x88);
    rows[8 + c] = _mm512_shuffle_f32x4(a, d, 0xdd);
    rows[12 + c] = _mm512_shuffle_f32x4(b, e, 0xdd);
  }
}

// Where a sequence's rows and tokens are. attention_own.py packs this and what follows.
struct Span {
  int64_t row, rows;       // its rows among all
  int64_t first, count;    // tokens that are seen, `first` to `count - 1`; the last are the rows
  int64_t masked;          // from here on `hidden` [rows, count - masked] tells, where there is one
  const uint8_t* hidden;
  const int64_t* places;   // of tokens 0 to count - 1
};

struct Layer {
  const void *query, *keys, *values;
  void *cached_keys, *cached_values, *out;
  const float* sinks;  // of each head; null where there are none
  int64_t query_head, query_row, key_head, key_row, value_head, value_row;  // strides, in numbers
  int64_t cached_key_head, cached_value_head;
  int64_t heads, groups, width, value_width;
  float scaling, softcap;  // 0: no cap
};

template <int QUERIES>
inline void scores_of(const float* query, const float* keys, int64_t width, float* to,
                      int64_t stride) {
  __m512 sums[QUERIES];
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++) sums[q] = _mm512_setzero_ps();
  for (int64_t d = 0; d < width; d++) {
    __m512 key = _mm512_load_ps(keys + d * LANES);
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; q++)
      sums[q] = _mm512_fmadd_ps(_mm512_set1_ps(query[q * width + d]), key, sums[q]);
  }
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++) _mm512_storeu_ps(to + q * stride, sums[q]);
}

template <int QUERIES, int WIDE, typename T>
inline void weighed(const float* weights, int64_t stride, const T* values, int64_t value_width,
                    const int64_t* places, int64_t count, float* out, float* totals) {
  __m512 sums[QUERIES][WIDE], total[QUERIES];
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++) total[q] = _mm512_set1_ps(totals[q]);
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 16
    for (int v = 0; v < WIDE; v++) sums[q][v] = _mm512_loadu_ps(out + q * value_width + v * LANES);
  for (int64_t t = 0; t < count; t++) {
    __m512 value[WIDE];
#pragma GCC unroll 16
    for (int v = 0; v < WIDE; v++) {
      value[v] = load(values + places[t] * value_width + v * LANES);
      if (t + 8 < count) __builtin_prefetch(values + places[t + 8] * value_width + v * LANES);
    }
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; q++) {
      __m512 weight = _mm512_set1_ps(weights[q * stride + t]);
      total[q] = _mm512_add_ps(total[q], weight);
#pragma GCC unroll 16
      for (int v = 0; v < WIDE; v++) sums[q][v] = _mm512_fmadd_ps(weight, value[v], sums[q][v]);
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 16
    for (int v = 0; v < WIDE; v++) _mm512_storeu_ps(out + q * value_width + v * LANES, sums[q][v]);
#pragma GCC unroll 16
  for (int q = 0; q < QUERIES; q++) totals[q] = _mm512_cvtss_f32(total[q]);
}

// Queries `from` to `upto - 1` of one key head of a span: row by row, each with the key head's
// query heads. False where memory is out.
template <typename T>
bool some(const Layer& layer, const Span& span, int64_t group, int64_t from, int64_t upto) {
  const int64_t per_group = layer.heads / layer.groups, queries = upto - from;
  const int64_t width = layer.width, value_width = layer.value_width;
  const int64_t count = span.count - span.first, whole = (count + LANES - 1) / LANES * LANES;
  static thread_local std::vector<float> scratch;
  const size_t needed =
      queries * (width + whole + value_width + 2) + width * LANES + 2 * LANES;
  if (scratch.size() < needed) {
    try {
      scratch = std::vector<float>();
      scratch = std::vector<float>(needed);
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  float* keys = (float*)(((uintptr_t)scratch.data() + 63) / 64 * 64);
  float* query = keys + width * LANES;
  float* scores = query + queries * width;
  float* sums = scores + queries * whole;
  // What all weights of a query come to: its sink first. And where the sum over further values goes.
  float *totals = sums + queries * value_width, *again = totals + queries;

  for (int64_t q = 0; q < queries; q++) {
    const int64_t head = group * per_group + (from + q) % per_group;
    const int64_t row = span.row + (from + q) / per_group;
    const T* own = (const T*)layer.query + head * layer.query_head + row * layer.query_row;
    for (int64_t d = 0; d < width; d += LANES)
      _mm512_storeu_ps(query + q * width + d, _mm512_mul_ps(load(own + d), _mm512_set1_ps(layer.scaling)));
  }

  const int64_t* places = span.places + span.first;
  const T* cached = (const T*)layer.cached_keys + group * layer.cached_key_head;
  for (int64_t t = 0; t < whole; t += LANES) {
    for (int64_t d = 0; d < width; d += LANES) {
      __m512 block[LANES];
      for (int k = 0; k < LANES; k++) {
        block[k] = load(cached + places[t + k < count ? t + k : count - 1] * width + d);
        if (t + LANES + k < count)
          __builtin_prefetch(cached + places[t + LANES + k] * width + d);
      }
      transpose(block);
      for (int k = 0; k < LANES; k++) _mm512_store_ps(keys + (d + k) * LANES, block[k]);
    }
    int64_t q = 0;
    for (; q + SCORED <= queries; q += SCORED)
      scores_of<SCORED>(query + q * width, keys, width, scores + q * whole + t, whole);
    for (; q + 3 <= queries; q += 3)
      scores_of<3>(query + q * width, keys, width, scores + q * whole + t, whole);
    for (; q < queries; q++)
      scores_of<1>(query + q * width, keys, width, scores + q * whole + t, whole);
  }

  const float lowest = -std::numeric_limits<float>::infinity();
  for (int64_t q = 0; q < queries; q++) {
    float* own = scores + q * whole;
    if (layer.softcap)
      for (int64_t t = 0; t < whole; t += LANES)
        _mm512_storeu_ps(own + t, capped(_mm512_loadu_ps(own + t), layer.softcap));
    for (int64_t t = count; t < whole; t++) own[t] = lowest;
    if (span.hidden) {
      const int64_t tail = span.count - span.masked;
      const uint8_t* hidden = span.hidden + (from + q) / per_group * tail;
      float* last = own + span.masked - span.first;
      for (int64_t t = 0; t < tail; t++)
        if (hidden[t]) last[t] = lowest;
    }
    // A sink takes part in the sum and has no value: attention to nothing.
    const __m512 sink = _mm512_set1_ps(
        layer.sinks ? layer.sinks[group * per_group + (from + q) % per_group] : lowest);
    __m512 top = sink;
    for (int64_t t = 0; t < whole; t += LANES) top = _mm512_max_ps(top, _mm512_loadu_ps(own + t));
    top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t t = 0; t < whole; t += LANES) {
      _mm512_storeu_ps(own + t, exponential(_mm512_sub_ps(_mm512_loadu_ps(own + t), top)));
    }
    totals[q] = _mm512_cvtss_f32(exponential(_mm512_sub_ps(sink, top)));
  }

  const T* values = (const T*)layer.cached_values + group * layer.cached_value_head;
  std::memset(sums, 0, queries * value_width * sizeof(float));
  std::memset(again, 0, queries * sizeof(float));
  for (int64_t t = 0; t < count; t += AT_A_TIME)
    for (int64_t e = 0; e < value_width;) {
      const int64_t keys_here = count - t < AT_A_TIME ? count - t : AT_A_TIME;
      const bool wide = e + VECTORS * LANES <= value_width;
      for (int64_t q = 0; q < queries;) {
        const bool many = q + WEIGHED <= queries;
        auto run = many ? (wide ? weighed<WEIGHED, VECTORS, T> : weighed<WEIGHED, 1, T>)
                        : (wide ? weighed<1, VECTORS, T> : weighed<1, 1, T>);
        run(scores + q * whole + t, whole, values + e, value_width, places + t, keys_here,
            sums + q * value_width + e, (e ? again : totals) + q);
        q += many ? WEIGHED : 1;
      }
      e += wide ? VECTORS * LANES : LANES;
    }
  for (int64_t q = 0; q < queries; q++) {
    const int64_t head = group * per_group + (from + q) % per_group;
    const int64_t row = span.row + (from + q) / per_group;
    T* to = (T*)layer.out + (row * layer.heads + head) * value_width;
    for (int64_t e = 0; e < value_width; e += LANES)
      store(to + e, _mm512_div_ps(_mm512_loadu_ps(sums + q * value_width + e),
                                  _mm512_set1_ps(totals[q])));
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
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; task++) {
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
    }
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks * shares; task++) {
      const Span& span = spans[task / shares / layer.groups];
      const int64_t queries = span.rows * per_group, share = task % shares;
      const int64_t from = queries * share / shares, upto = queries * (share + 1) / shares;
      const int64_t kept = KEPT / (span.count - span.first + LANES) / SCORED * SCORED;
      const int64_t step = kept > LEAST ? kept : LEAST;
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
