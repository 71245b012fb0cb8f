// A device for ggml, which libllama computes with: products of a few rows with weights in bfloat16,
// float16 and Q8_0, laid out in panels when a model is loaded.
//
// ggml's own product of one row reads a weight at half the speed of memory or so, and that of five
// takes twice as long. These read it once from one end to the other for all rows, as fast as memory
// is. Everything else of a graph stays the processor's. ggml's public headers come with
// llama-cpp-python; what a device hands to ggml is declared here, as its API version 2 has it, which
// ggml asks for when it loads this.

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <vector>

#include "rows.h"

#define VISIBLE extern "C" __attribute__((visibility("default")))
constexpr int API_VERSION = 2;

struct ggml_backend_buffer_type {
  const char* (*get_name)(ggml_backend_buffer_type_t);
  ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t size);
  size_t (*get_alignment)(ggml_backend_buffer_type_t);
  size_t (*get_max_size)(ggml_backend_buffer_type_t);
  size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor*);
  bool (*is_host)(ggml_backend_buffer_type_t);
  ggml_backend_dev_t device;
  void* context;
};

struct OutriderBufferCalls {
  void (*free_buffer)(ggml_backend_buffer_t);
  void* (*get_base)(ggml_backend_buffer_t);
  ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor*);
  void (*memset_tensor)(ggml_backend_buffer_t, ggml_tensor*, uint8_t, size_t offset, size_t size);
  void (*set_tensor)(ggml_backend_buffer_t, ggml_tensor*, const void*, size_t offset, size_t size);
  void (*get_tensor)(ggml_backend_buffer_t, const ggml_tensor*, void*, size_t offset, size_t size);
  void* set_tensor_2d;
  void* get_tensor_2d;
  bool (*cpy_tensor)(ggml_backend_buffer_t, const ggml_tensor*, ggml_tensor*);
  void (*clear)(ggml_backend_buffer_t, uint8_t);
  void (*reset)(ggml_backend_buffer_t);
};

struct ggml_backend_buffer {
  OutriderBufferCalls calls;
  ggml_backend_buffer_type_t buft;
  void* context;
  size_t size;
  ggml_backend_buffer_usage usage;
};

// Exported by ggml, and in no public header.
extern "C" ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t,
                                                          OutriderBufferCalls,
                                                          void* context, size_t size);

struct ggml_backend {
  ggml_guid_t guid;
  const char* (*get_name)(ggml_backend_t);
  void (*free)(ggml_backend_t);
  void* asynchronous[5];
  void (*synchronize)(ggml_backend_t);
  void* plans[4];
  ggml_status (*graph_compute)(ggml_backend_t, ggml_cgraph*);
  void* events[2];
  void* graph_optimize;
  ggml_backend_dev_t device;
  void* context;
};

struct ggml_backend_device {
  const char* (*get_name)(ggml_backend_dev_t);
  const char* (*get_description)(ggml_backend_dev_t);
  void (*get_memory)(ggml_backend_dev_t, size_t* free, size_t* total);
  enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t);
  void (*get_props)(ggml_backend_dev_t, ggml_backend_dev_props*);
  ggml_backend_t (*init_backend)(ggml_backend_dev_t, const char*);
  ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t);
  void* get_host_buffer_type;
  void* buffer_from_host_ptr;
  bool (*supports_op)(ggml_backend_dev_t, const ggml_tensor*);
  bool (*supports_buft)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
  void* offload_op;
  void* events[3];
  ggml_backend_reg_t reg;
  void* context;
};

struct ggml_backend_reg {
  int api_version;
  const char* (*get_name)(ggml_backend_reg_t);
  size_t (*get_device_count)(ggml_backend_reg_t);
  ggml_backend_dev_t (*get_device)(ggml_backend_reg_t, size_t);
  void* (*get_proc_address)(ggml_backend_reg_t, const char*);
  void* context;
};

// The records' sizes as ggml's own header has them on 64 bits: places of functions that are called.
static_assert(offsetof(ggml_backend_buffer_type, device) == 48, "buffer type");
static_assert(sizeof(OutriderBufferCalls) == 88, "buffer");
static_assert(offsetof(ggml_backend, graph_compute) == 104 && offsetof(ggml_backend, device) == 136,
              "backend");
static_assert(offsetof(ggml_backend_device, supports_op) == 72 &&
                  offsetof(ggml_backend_device, reg) == 120,
              "device");

namespace {

extern ggml_backend_buffer_type TYPE;
extern ggml_backend_device DEVICE;
extern ggml_backend_reg REGISTRY;

// Whether this thread is loading a model whose weights are to be laid out, and how many bytes were.
thread_local bool loading = false;
thread_local size_t bytes_laid_out = 0;

const char* name_of(...) { return "Outrider"; }

struct Kind {
  ggml_type type;
  bool (*has)();
  size_t (*bytes)(long width, long count);
  void (*lay_out)(const void*, void*, long width, long count);
  void (*put_back)(const void*, void*, long width, long count);
  size_t (*work)(long rows, long width);
  bool (*of_rows)(const Strided*, const void*, float*, char*, long, long, long, int);
};

#define KIND(type, name)                                                                  \
  {type, outrider_has_##name, outrider_##name##_bytes, outrider_lay_out_##name,           \
   outrider_put_back_##name, outrider_##name##_work, outrider_##name##_of_rows}

const Kind KINDS[] = {
    KIND(GGML_TYPE_BF16, panels), KIND(GGML_TYPE_F16, halves), KIND(GGML_TYPE_Q8_0, blocks)};

// The kind of a tensor's numbers; null where they are left as they are.
const Kind* kind_of(const ggml_tensor* tensor) {
  for (const Kind& kind : KINDS)
    if (kind.type == tensor->type && kind.has()) return &kind;
  return nullptr;
}

// A buffer of weights, all of them of a kind and laid out as wholes. Nobody else reads there: ggml
// copies what another operation wants, as it does from a GPU, and has it as it was in the file.

size_t alloc_size(ggml_backend_buffer_type_t, const ggml_tensor* tensor) {
  const Kind* kind = kind_of(tensor);
  return kind ? kind->bytes(tensor->ne[0], ggml_nrows(tensor)) : ggml_nbytes(tensor);
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, size_t offset,
                size_t size) {
  const Kind* kind = kind_of(tensor);
  GGML_ASSERT(kind && !tensor->view_src && offset == 0 && size == ggml_nbytes(tensor));
  bytes_laid_out += size;
  kind->lay_out(data, tensor->data, tensor->ne[0], ggml_nrows(tensor));
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor* tensor, void* data, size_t offset,
                size_t size) {
  if (tensor->view_src) offset += tensor->view_offs, tensor = tensor->view_src;
  std::vector<char> whole(ggml_nbytes(tensor));
  GGML_ASSERT(kind_of(tensor) && offset + size <= whole.size());
  kind_of(tensor)->put_back(tensor->data, whole.data(), tensor->ne[0], ggml_nrows(tensor));
  std::memcpy(data, whole.data() + offset, size);
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
  void* memory = ::operator new(size, std::align_val_t(64), std::nothrow);
  if (memory == nullptr) return nullptr;
  OutriderBufferCalls calls = {};
  calls.free_buffer = [](ggml_backend_buffer_t buffer) {
    ::operator delete(buffer->context, std::align_val_t(64));
  };
  calls.get_base = [](ggml_backend_buffer_t buffer) { return buffer->context; };
  calls.set_tensor = set_tensor;
  calls.get_tensor = get_tensor;
  calls.clear = [](ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(buffer->context, value, buffer->size);
  };
  return ggml_backend_buffer_init(type, calls, memory, size);
}

struct Worker {
  int threads = 1;
  std::vector<char> rows;
};

void set_threads(ggml_backend_t backend, int threads) {
  ((Worker*)backend->context)->threads = threads;
}

bool multiply(Worker* worker, ggml_tensor* out) {
  const ggml_tensor *weight = out->src[0], *inputs = out->src[1];
  Strided x = {(const char*)inputs->data,
               {inputs->ne[1], inputs->ne[2], inputs->ne[3]},
               {inputs->nb[1], inputs->nb[2], inputs->nb[3]}};
  long rows = ggml_nrows(inputs), width = weight->ne[0], count = weight->ne[1];
  const Kind* kind = kind_of(weight);
  size_t needed = kind->work(rows, width) + 64;
  if (worker->rows.size() < needed) worker->rows.resize(needed);
  char* work = worker->rows.data();
  work += -(uintptr_t)work & 63;
  return kind->of_rows(&x, weight->data, (float*)out->data, work, rows, width, count,
                       worker->threads);
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) {
  try {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
      ggml_tensor* node = ggml_graph_node(graph, i);
      if (node->op == GGML_OP_MUL_MAT && (node->flags & GGML_TENSOR_FLAG_COMPUTE) &&
          !multiply((Worker*)backend->context, node))
        return GGML_STATUS_ALLOC_FAILED;
    }
  } catch (const std::bad_alloc&) {
    return GGML_STATUS_ALLOC_FAILED;
  }
  return GGML_STATUS_SUCCESS;
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char*) {
  static ggml_guid guid = {'o', 'u', 't', 'r', 'i', 'd', 'e', 'r', 0, 'r', 'o', 'w', 's'};
  auto* backend = new ggml_backend{};
  backend->guid = &guid;
  backend->get_name = [](ggml_backend_t) { return name_of(); };
  backend->free = [](ggml_backend_t whole) {
    delete (Worker*)whole->context;
    delete whole;
  };
  backend->graph_compute = compute;
  backend->device = device;
  backend->context = new Worker;
  return backend;
}

const ggml_tensor* laid_out_here(const ggml_tensor* tensor) {
  if (tensor && tensor->view_src) tensor = tensor->view_src;
  bool here = tensor && tensor->buffer && ggml_backend_buffer_get_type(tensor->buffer) == &TYPE;
  return here ? tensor : nullptr;
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor* op) {
  if (op->op != GGML_OP_MUL_MAT) {
    // The weights themselves, and views of them, are nobody else's.
    bool view = op->op == GGML_OP_NONE || op->op == GGML_OP_VIEW || op->op == GGML_OP_RESHAPE ||
                op->op == GGML_OP_PERMUTE || op->op == GGML_OP_TRANSPOSE;
    return view && laid_out_here(op);
  }
  const ggml_tensor *weight = op->src[0], *inputs = op->src[1];
  // A loader asks with an empty buffer which weights are to lie here.
  return laid_out_here(weight) == weight && (weight->buffer->size > 0 || loading) &&
         kind_of(weight) && ggml_nrows(weight) == weight->ne[1] &&
         inputs->type == GGML_TYPE_F32 && inputs->nb[0] == sizeof(float);
}

bool supports_type(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
  return type == &TYPE || ggml_backend_buft_is_host(type);
}

void* proc_address(ggml_backend_reg_t, const char* name) {
  return std::strcmp(name, "ggml_backend_set_n_threads") ? nullptr : (void*)set_threads;
}

ggml_backend_buffer_type TYPE = {
    [](ggml_backend_buffer_type_t) { return name_of(); },
    alloc_buffer,
    [](ggml_backend_buffer_type_t) -> size_t { return 64; },
    nullptr,
    alloc_size,
    nullptr,
    &DEVICE,
    nullptr};

ggml_backend_device DEVICE = {
    [](ggml_backend_dev_t) { return name_of(); },
    [](ggml_backend_dev_t) { return "Products of a few rows"; },
    [](ggml_backend_dev_t, size_t* free, size_t* total) { *free = *total = 0; },
    [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; },
    [](ggml_backend_dev_t, ggml_backend_dev_props* props) {
      *props = {};
      props->name = props->description = name_of();
      props->type = GGML_BACKEND_DEVICE_TYPE_ACCEL;
    },
    init_backend,
    // What products write is the processor's.
    [](ggml_backend_dev_t) { return loading ? &TYPE : ggml_backend_cpu_buffer_type(); },
    nullptr,
    nullptr,
    supports_op,
    supports_type,
    nullptr,
    {},
    &REGISTRY,
    nullptr};

ggml_backend_reg REGISTRY = {
    API_VERSION,
    [](ggml_backend_reg_t) { return name_of(); },
    [](ggml_backend_reg_t) -> size_t { return 1; },
    [](ggml_backend_reg_t, size_t) { return &DEVICE; },
    proc_address,
    nullptr};

bool same(const char* one, const char* other) { return std::strcmp(one, other) == 0; }

}  // namespace

// What ggml asks for when it loads this; null where it is not the ggml that the headers are of.
VISIBLE ggml_backend_reg_t ggml_backend_init() {
  bool known = ggml_tensor_overhead() == 32 + GGML_TENSOR_SIZE &&  // With a record of its own.
               same(ggml_type_name(GGML_TYPE_Q8_0), "q8_0") &&
               same(ggml_type_name(GGML_TYPE_F16), "f16") &&
               same(ggml_type_name(GGML_TYPE_BF16), "bf16") &&
               same(ggml_op_name(GGML_OP_MUL_MAT), "MUL_MAT") &&
               same(ggml_op_name(GGML_OP_VIEW), "VIEW");
  return known ? &REGISTRY : nullptr;
}

// This thread begins to load a model whose weights are to be laid out.
VISIBLE void outrider_load() { loading = true, bytes_laid_out = 0; }

// It is done; how many bytes of weights were laid out.
VISIBLE size_t outrider_loaded() { return loading = false, bytes_laid_out; }

// What models' weights are laid out in, for tests.
VISIBLE ggml_backend_buffer_type_t outrider_buffer_type() { return &TYPE; }
VISIBLE ggml_backend_dev_t outrider_device() { return &DEVICE; }
