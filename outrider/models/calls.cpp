// Calls from the machine code of forwards to Outrider's products and attention, nothing between.
//
// A package (compiled.py) calls the three functions at the end, by way of names.cpp. Whoever runs one
// has told before, in this thread, what its layers are (calls.py). What is not told, or does not lie
// as the code behind takes it, goes to the operators of those names, which are Python's.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"

typedef int (*Product)(const void* inputs, const void* weight, const void* bias, void* out,
                       long rows, long width, long count, int threads);
typedef int (*Gated)(const void* inputs, const void* gates, const void* gates_bias,
                     const void* down, const void* down_bias, void* out, long rows, long width,
                     long inner, long count, int act, int threads);
typedef int (*Attention)(const Layer*, const Span*, int64_t num_spans, int is_bfloat16, int threads);

// calls.py has all of these, field by field.
struct Linear {
  Product run;      // null: Python's
  Gated run_gated;  // of a block of two such layers; null: Python's
  const void *weight, *bias;
  int64_t width, count, most_rows;
  int32_t dtype, alone;  // torch's number of it; whether one thread is enough
};

struct Pool {
  void *keys, *values;  // null: Python's
  int64_t key_head, value_head, groups, width, value_width, reach;
};

struct Spans {
  const Span* table;
  int64_t count, rows, scores;
};

struct Time {
  int64_t nanoseconds, calls;
};

struct Call {
  const Linear* linears;
  const Pool* pools;
  const Spans* spans;  // by reach
  Attention attend;
  Time* times;  // of each linear layer, then of attention; null where nobody asks
  int64_t num_linears, num_pools;
  int32_t dtype, bfloat16, threads;
  int32_t failed;  // memory was out
};

static thread_local Call* call;

// What is told from here on in this thread; what was before.
extern "C" Call* outrider_enter(Call* told) {
  Call* before = call;
  call = told;
  return before;
}

namespace {

// Multiplications up to which one thread of attention is as fast as several.
constexpr int64_t ALONE = 1 << 16;

int64_t now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// Notes what a call has taken since it was made, or a share of it, where somebody asks.
class Timed {
 public:
  explicit Timed(int64_t which, double share = 1)
      : time_(call->times ? call->times + which : nullptr), share_(share), start_(time_ ? now() : 0) {}
  ~Timed() {
    if (!time_) return;
    time_->nanoseconds += share_ * (now() - start_);
    time_->calls++;
  }

 private:
  Time* time_;
  double share_;
  int64_t start_;
};

// A tensor of a package, as it lies; not `good` where torch says nothing of it.
struct Seen {
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = -1;
  void* data = nullptr;
  bool good;

  explicit Seen(AtenTensorHandle tensor)
      : good(!aoti_torch_get_dim(tensor, &dims) && !aoti_torch_get_sizes(tensor, &sizes) &&
             !aoti_torch_get_strides(tensor, &strides) && !aoti_torch_get_dtype(tensor, &dtype) &&
             !aoti_torch_get_data_ptr(tensor, &data)) {}

  // Whether its numbers lie one after another.
  bool dense() const {
    int64_t step = 1;
    for (int64_t d = dims - 1; d >= 0; step *= sizes[d--])
      if (sizes[d] != 1 && strides[d] != step) return false;
    return true;
  }
};

constexpr int64_t MOST_DIMS = 4;

// A new tensor of these sizes, without gaps; its numbers are behind `data`.
AOTITorchError made(int64_t dims, const int64_t* sizes, int32_t dtype, AtenTensorHandle* out,
                    void** data) {
  int64_t strides[MOST_DIMS], step = 1;
  for (int64_t d = dims - 1; d >= 0; step *= sizes[d--]) strides[d] = step;
  const AOTITorchError error = aoti_torch_empty_strided(
      dims, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, out);
  return error ? error : aoti_torch_get_data_ptr(*out, data);
}

// Arguments of an operator as torch's dispatcher takes them.
AOTITorchError put(StableIValue* to, AtenTensorHandle tensor) {
  AtenTensorHandle own;
  const AOTITorchError error = aoti_torch_new_tensor_handle(tensor, &own);
  *to = (StableIValue)own;
  return error;
}

StableIValue of(double number) {
  StableIValue found = 0;
  std::memcpy(&found, &number, sizeof number);
  return found;
}

// It is the dispatcher that frees the inner value.
StableIValue maybe(StableIValue inner) { return (StableIValue) new StableIValue(inner); }

AOTITorchError asked(const char* name, StableIValue* stack, AtenTensorHandle* out) {
  const AOTITorchError error = aoti_torch_call_dispatcher(name, "", stack);
  *out = (AtenTensorHandle)stack[0];
  return error;
}

// The sinks of so many heads as attention reads them; null: they do not lie as they should.
const float* as_floats(AtenTensorHandle sinks, int64_t heads) {
  const Seen own(sinks);
  if (!own.good || own.dims != 1 || own.sizes[0] != heads || !own.dense()) return nullptr;
  if (own.dtype == aoti_torch_dtype_float32()) return (const float*)own.data;
  if (own.dtype != aoti_torch_dtype_bfloat16()) return nullptr;
  static thread_local std::vector<float> numbers;
  numbers.resize(heads);
  for (int64_t h = 0; h < heads; h++) {
    const uint32_t bits = uint32_t(((const uint16_t*)own.data)[h]) << 16;
    std::memcpy(&numbers[h], &bits, sizeof bits);
  }
  return numbers.data();
}

// Rows of a layer, as it takes them; none where it does not.
struct Rows {
  int64_t count = 0, dims = 0, sizes[MOST_DIMS];
  const void* data = nullptr;

  Rows(AtenTensorHandle inputs, const Linear& own) {
    const Seen x(inputs);
    if (!x.good || x.dims < 1 || x.dims > MOST_DIMS || x.dtype != own.dtype || !x.dense() ||
        x.sizes[x.dims - 1] != own.width)
      return;
    int64_t all = 1;
    for (int64_t d = 0; d < x.dims - 1; d++) all *= sizes[d] = x.sizes[d];
    if (all > own.most_rows) return;
    count = all, dims = x.dims, data = x.data;
  }
  // As many rows of so many numbers.
  AOTITorchError like(int64_t width, int32_t dtype, AtenTensorHandle* out, void** to) {
    sizes[dims - 1] = width;
    return made(dims, sizes, dtype, out, to);
  }
};

bool multiplied(AtenTensorHandle inputs, int64_t which, int64_t out_features,
                AtenTensorHandle* out, AOTITorchError* error) {
  if (!call || which >= call->num_linears) return false;
  const Linear& own = call->linears[which];
  if (!own.run || own.count != out_features) return false;
  Rows x(inputs, own);
  if (!x.count) return false;
  const Timed timed(which);
  void* y;
  if ((*error = x.like(own.count, own.dtype, out, &y))) return true;
  const int threads = own.alone ? 1 : call->threads;
  if (own.run(x.data, own.weight, own.bias, y, x.count, own.width, own.count, threads))
    call->failed = 1;
  return true;
}

bool gated(AtenTensorHandle inputs, int64_t which, int64_t next, int64_t act, int64_t out_features,
           AtenTensorHandle* out, AOTITorchError* error) {
  if (!call || which >= call->num_linears || next >= call->num_linears) return false;
  const Linear &gates = call->linears[which], &down = call->linears[next];
  if (!gates.run_gated || gates.run_gated != down.run_gated || gates.count != 2 * down.width ||
      down.count != out_features)
    return false;
  Rows x(inputs, gates);
  if (!x.count) return false;
  // Each layer has its weight's share of the time.
  const double of_gates = double(gates.width) * gates.count, of_down = double(down.width) * down.count;
  const Timed timed(which, of_gates / (of_gates + of_down));
  const Timed timed_too(next, of_down / (of_gates + of_down));
  void* y;
  if ((*error = x.like(down.count, down.dtype, out, &y))) return true;
  const int threads = gates.alone ? 1 : call->threads;
  if (gates.run_gated(x.data, gates.weight, gates.bias, down.weight, down.bias, y, x.count,
                      gates.width, down.width, down.count, act, threads))
    call->failed = 1;
  return true;
}

bool attended(AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values,
              int64_t which, double scaling, const double* softcap, AtenTensorHandle* sinks,
              AtenTensorHandle* out, AOTITorchError* error) {
  if (!call || !call->attend || which >= call->num_pools) return false;
  const Pool& pool = call->pools[which];
  if (!pool.keys) return false;
  const Seen q(query), k(keys), v(values);
  for (const Seen* one : {&q, &k, &v})
    if (!one->good || one->dims != 4 || one->sizes[0] != 1 || one->dtype != call->dtype ||
        (one->sizes[3] != 1 && one->strides[3] != 1))
      return false;
  const Spans& spans = call->spans[pool.reach];
  const int64_t heads = q.sizes[1], rows = q.sizes[2];
  if (spans.rows != rows || heads % pool.groups || q.sizes[3] != pool.width ||
      k.sizes[1] != pool.groups || k.sizes[2] != rows || k.sizes[3] != pool.width ||
      v.sizes[1] != pool.groups || v.sizes[2] != rows || v.sizes[3] != pool.value_width)
    return false;
  const float* sink = sinks ? as_floats(*sinks, heads) : nullptr;
  if (sinks && !sink) return false;
  const Timed timed(call->num_linears);
  const int64_t sizes[] = {1, rows, heads, pool.value_width};
  void* to;
  if ((*error = made(4, sizes, call->dtype, out, &to))) return true;
  const Layer layer = {
      q.data,       k.data,       v.data,       pool.keys,    pool.values,  to,
      sink,         q.strides[1], q.strides[2], k.strides[1], k.strides[2], v.strides[1],
      v.strides[2], pool.key_head, pool.value_head, heads,    pool.groups,  pool.width,
      pool.value_width, (float)scaling, softcap ? (float)*softcap : 0.0f};
  const bool several = spans.scores * heads * (pool.width + pool.value_width) > ALONE;
  if (call->attend(&layer, spans.table, spans.count, call->bfloat16, several ? call->threads : 1))
    call->failed = 1;
  return true;
}

}  // namespace

extern "C" AOTITorchError outrider_linear(AtenTensorHandle inputs, int64_t which,
                                          int64_t out_features, AtenTensorHandle* out) {
  AOTITorchError error = AOTI_TORCH_SUCCESS;
  if (multiplied(inputs, which, out_features, out, &error)) return error;
  StableIValue stack[] = {0, (StableIValue)which, (StableIValue)out_features};
  if ((error = put(stack, inputs))) return error;
  return asked("outrider::own_linear", stack, out);
}

extern "C" AOTITorchError outrider_gated(AtenTensorHandle inputs, int64_t gates, int64_t down,
                                         int64_t act, int64_t out_features,
                                         AtenTensorHandle* out) {
  AOTITorchError error = AOTI_TORCH_SUCCESS;
  if (gated(inputs, gates, down, act, out_features, out, &error)) return error;
  StableIValue stack[] = {0, (StableIValue)gates, (StableIValue)down, (StableIValue)act,
                          (StableIValue)out_features};
  if ((error = put(stack, inputs))) return error;
  return asked("outrider::own_gated", stack, out);
}

extern "C" AOTITorchError outrider_attention(AtenTensorHandle query, AtenTensorHandle keys,
                                             AtenTensorHandle values, int64_t layer,
                                             double scaling, double* softcap,
                                             AtenTensorHandle* sinks, AtenTensorHandle* out) {
  AOTITorchError error = AOTI_TORCH_SUCCESS;
  if (attended(query, keys, values, layer, scaling, softcap, sinks, out, &error)) return error;
  StableIValue stack[] = {0, 0, 0, (StableIValue)layer, of(scaling), 0, 0};
  if ((error = put(stack, query)) || (error = put(stack + 1, keys)) ||
      (error = put(stack + 2, values)))
    return error;
  if (softcap) stack[5] = maybe(of(*softcap));
  if (sinks) {
    StableIValue own;
    if ((error = put(&own, *sinks))) return error;
    stack[6] = maybe(own);
  }
  return asked("outrider::own_attention", stack, out);
}
