// The names by which packages of machine code find their calls (calls.cpp), for a whole process.
//
// What is loaded for everybody to find brings along all that it needs: so this needs nothing.

#include <cstdint>

typedef int32_t (*Linear)(void*, int64_t, int64_t, void**);
typedef int32_t (*Gated)(void*, int64_t, int64_t, int64_t, int64_t, void**);
typedef int32_t (*Attention)(void*, void*, void*, int64_t, double, double*, void**, void**);

extern "C" {
Linear outrider_linear_call;
Gated outrider_gated_call;
Attention outrider_attention_call;

int32_t aoti_torch_cpu_own_linear(void* inputs, int64_t which, int64_t out_features, void** out) {
  return outrider_linear_call(inputs, which, out_features, out);
}

int32_t aoti_torch_cpu_own_gated(void* inputs, int64_t gates, int64_t down, int64_t act,
                                 int64_t out_features, void** out) {
  return outrider_gated_call(inputs, gates, down, act, out_features, out);
}

int32_t aoti_torch_cpu_own_attention(void* query, void* keys, void* values, int64_t layer,
                                     double scaling, double* softcap, void** sinks, void** out) {
  return outrider_attention_call(query, keys, values, layer, scaling, softcap, sinks, out);
}
}
