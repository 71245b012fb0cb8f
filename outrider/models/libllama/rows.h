// Products of rows of float32 with weights that were laid out, as ggml's device asks for them.

#pragma once

#include <cstddef>
#include <cstdint>

// Rows of float32 numbers in up to three dimensions; those of a row have no gaps.
struct Strided {
  const char* data;
  int64_t ne[3];
  size_t nb[3];

  const float* row(long which) const {
    long i = which % ne[0], j = which / ne[0] % ne[1], k = which / ne[0] / ne[1];
    return (const float*)(data + i * nb[0] + j * nb[1] + k * nb[2]);
  }
};

// By kind of weight: whether this processor has a product, bytes of a weight `[count, width]` that is
// laid out, laying one out and putting it back, bytes that a product works in, and y[r, o] = sum over
// i of w[o, i] x[r, i]; false where memory is out.
#define OUTRIDER_KIND(name)                                                                \
  bool outrider_has_##name();                                                              \
  size_t outrider_##name##_bytes(long width, long count);                                  \
  void outrider_lay_out_##name(const void* weight, void* panels, long width, long count);  \
  void outrider_put_back_##name(const void* panels, void* weight, long width, long count); \
  size_t outrider_##name##_work(long rows, long width);                                    \
  bool outrider_##name##_of_rows(const Strided* x, const void* w, float* y, char* work,    \
                                 long rows, long width, long count, int threads);

// A kind for which this processor has none.
#define OUTRIDER_NO_KIND(name)                                                                     \
  bool outrider_has_##name() { return false; }                                                     \
  size_t outrider_##name##_bytes(long, long) { return 0; }                                         \
  void outrider_lay_out_##name(const void*, void*, long, long) {}                                  \
  void outrider_put_back_##name(const void*, void*, long, long) {}                                 \
  size_t outrider_##name##_work(long, long) { return 0; }                                          \
  bool outrider_##name##_of_rows(const Strided*, const void*, float*, char*, long, long, long,     \
                                 int) {                                                            \
    return false;                                                                                  \
  }

#pragma GCC visibility push(default)
extern "C" {
OUTRIDER_KIND(panels)  // bfloat16 (product.cpp)
OUTRIDER_KIND(halves)  // float16
OUTRIDER_KIND(blocks)  // Q8_0
}
#pragma GCC visibility pop
