// What a gated block of a model does with rows, in one: down(act(gate(x)) * up(x)).
//
// Each thread has its share of the inner numbers, from the gates' weights to those of `down`, whose
// sums over all shares are added in the end. So of what lies between nothing goes from core to core,
// which for some rows takes longer than their arithmetic. The order of a sum depends on how many
// threads there are, and not on how many rows.

#include "panels.h"

#if defined(OUTRIDER_VECTORS)
using namespace panels;

namespace {

enum Act { SILU, GELU_TANH };

inline Vector sigmoid(Vector x) {
  const Vector one = vectors::all(1.0f), e = vectors::exponential(-vectors::magnitude(x));
  return (x < vectors::all(0.0f) ? e : one) / (one + e);
}

inline Vector gated(Vector gate, Vector up, Act act) {
  Vector x = gate;
  if (act == GELU_TANH) {
    // (1 + tanh(y)) / 2 is the sigmoid of 2 y.
    const Vector cubed = gate * gate * gate;
    x = vectors::all(1.5957691216f) * vectors::fused(cubed, vectors::all(0.044715f), gate);
  }
  return gate * sigmoid(x) * up;
}

struct Gated {
  const Bfloat16 *gates, *gates_bias, *down, *down_bias;  // a bias may be null
  long width, inner, count;                               // `inner` is a multiple of PANEL
  Act act;

  long panels() const { return inner / PANEL; }
  long first(long thread, long threads) const { return panels() * thread / threads; }

  // Of a thread's panels `from..upto-1` what goes on: to [rows, (upto - from) PANEL].
  void make(const Ready* x, Bfloat16* to, long rows, long from, long upto) const {
    alignas(LINE) float gate[MANY_ROWS * PANEL], up[MANY_ROWS * PANEL];
    const long stride = (upto - from) * PANEL;
    for (long p = from; p < upto; p++, to += PANEL) {
      const Bfloat16 *own = gates + p * size(width), *other = own + inner / PANEL * size(width);
      const Bfloat16* then = p + 1 < upto ? own + size(width) : share_of(0, from);
      add_up(x, own, gate, rows, width, other);
      add_up(x, other, up, rows, width, then);
      for (int o = 0; o < PANEL; o += LANES) {
        Vector of_gate = vectors::all(0.0f), of_up = of_gate;
        if (gates_bias) {
          of_gate = vectors::load(gates_bias + p * PANEL + o);
          of_up = vectors::load(gates_bias + inner + p * PANEL + o);
        }
        for (long r = 0; r < rows; r++) {
          const long at = r * PANEL + o;
          vectors::store(to + r * stride + o, gated(vectors::load(gate + at) + of_gate,
                                                    vectors::load(up + at) + of_up, act));
        }
      }
    }
  }

  // What is read of panel q of `down` by who begins with inner panel `from`.
  const Bfloat16* share_of(long q, long from) const {
    return down + q * size(inner) + from * PANEL * PANEL;
  }

  // The part of `down`'s sums that these inner numbers make: to [its panels, rows, PANEL].
  void sum(const Ready* own, float* to, long rows, long from, long upto) const {
    for (long q = 0; q * PANEL < count; q++, to += rows * PANEL)
      add_up(own, share_of(q, from), to, rows, (upto - from) * PANEL, share_of(q + 1, from));
  }
};

}  // namespace

// x [rows, width], gates and down in panels, y [rows, count]; all without gaps. 0, or 1 where memory
// is out.
extern "C" int outrider_gated_panels(const Bfloat16* x, const Bfloat16* gates,
                                     const Bfloat16* gates_bias, const Bfloat16* down,
                                     const Bfloat16* down_bias, Bfloat16* y, long rows, long width,
                                     long inner, long count, int act, int threads) {
  const Gated own = {gates, gates_bias, down, down_bias, width, inner, count, (Act)act};
  if (threads > own.panels()) threads = own.panels();
  const long most = smaller(rows, MANY_ROWS), outs = (count + PANEL - 1) / PANEL * PANEL;
  const long share = (own.panels() + threads - 1) / threads * PANEL;
  // Rows made ready; then, for each thread, what is between, that made ready, and its sums.
  const size_t read = whole_lines(room(most, width) * sizeof(Ready)),
               between = whole_lines(most * share * sizeof(Bfloat16)),
               again = whole_lines(room(most, share) * sizeof(Ready)),
               each = between + again + whole_lines(most * outs * sizeof(float));
  char* const kept = scratch(read + threads * each);
  if (!kept) return 1;
  const auto between_of = [&](int t) { return (Bfloat16*)(kept + read + t * each); };
  const auto again_of = [&](int t) { return (Ready*)(kept + read + t * each + between); };
  const auto sums_of = [&](int t) { return (float*)(kept + read + t * each + between + again); };
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (long at = 0; at < rows; at += MANY_ROWS) {
    const long some = smaller(rows - at, MANY_ROWS);
    const Ready* here = ready_together(x + at * width, (Ready*)kept, some, width);
#pragma omp for schedule(static)
    for (int t = 0; t < threads; t++) {
      const long from = own.first(t, threads), upto = own.first(t + 1, threads);
      own.make(here, between_of(t), some, from, upto);
      const Ready* made = ready(between_of(t), again_of(t), some, (upto - from) * PANEL);
      own.sum(made, sums_of(t), some, from, upto);
    }
#pragma omp for schedule(static)
    for (long q = 0; q < outs / PANEL; q++) {
      const long begin = q * some * PANEL;
      float* const all = sums_of(0) + begin;
      for (int t = 1; t < threads; t++)
        for (long i = 0; i < some * PANEL; i += LANES)
          vectors::store(all + i, vectors::load(all + i) + vectors::load(sums_of(t) + begin + i));
      put(all, down_bias ? down_bias + q * PANEL : nullptr, y + at * count + q * PANEL, some, count,
          smaller(count - q * PANEL, PANEL));
    }
  }
  return 0;
}
#endif
