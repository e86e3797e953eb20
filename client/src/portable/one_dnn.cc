// The functions of oneDNN and libgomp that the CPU executor calls. Each looks its namesake up in
// the library when it is called; how long that takes is nothing beside the call itself.
#include "client/src/portable/one_dnn.h"

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>

#include <string>

namespace mk {
namespace {

// DNNL_VERSION_MAJOR is the library's ABI: its types are in this build's headers.
constexpr int kMajor = DNNL_VERSION_MAJOR;

struct Library {
  std::string name = "libdnnl.so." + std::to_string(kMajor);
  /// Its symbols stay its own: a training job may have another oneDNN.
  void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  std::string trouble = handle == nullptr ? ::dlerror() : "";
};

/// Never closed: primitives may live as long as the process.
const Library& library() {
  static const Library& opened = *new Library;
  return opened;
}

template <class Function>
Function* find(const char* name) {
  const Library& opened = library();
  return opened.handle == nullptr ? nullptr
                                  : reinterpret_cast<Function*>(::dlsym(opened.handle, name));
}

/// Calls oneDNN's own function of that name.
template <class... Parameters, class... Arguments>
dnnl_status_t call(dnnl_status_t (*)(Parameters...), const char* name, Arguments... arguments) {
  auto* const function = find<dnnl_status_t(Parameters...)>(name);
  return function == nullptr ? dnnl_unimplemented : function(arguments...);
}

}  // namespace

Status one_dnn_available() {
  const Library& opened = library();
  if (opened.handle != nullptr) return {};
  return fail(ErrorCode::kUnsupported,
              "the CPU executor needs oneDNN {}, and {} is not to be had: {}; install it (Debian: "
              "libdnnl{}), or choose Executor::kCuda",
              kMajor, opened.name, opened.trouble, kMajor);
}

}  // namespace mk

#define MK_FORWARD(name, parameters, ...)                     \
  extern "C" dnnl_status_t DNNL_API name parameters {         \
    return mk::call(&name, #name __VA_OPT__(, ) __VA_ARGS__); \
  }

MK_FORWARD(dnnl_engine_create, (dnnl_engine_t * a, dnnl_engine_kind_t b, size_t c), a, b, c)
MK_FORWARD(dnnl_engine_destroy, (dnnl_engine_t a), a)
MK_FORWARD(dnnl_stream_create, (dnnl_stream_t * a, dnnl_engine_t b, unsigned c), a, b, c)
MK_FORWARD(dnnl_stream_destroy, (dnnl_stream_t a), a)
MK_FORWARD(dnnl_stream_wait, (dnnl_stream_t a), a)
MK_FORWARD(dnnl_memory_create,
           (dnnl_memory_t * a, const dnnl_memory_desc_t* b, dnnl_engine_t c, void* d), a, b, c, d)
MK_FORWARD(dnnl_memory_destroy, (dnnl_memory_t a), a)
MK_FORWARD(dnnl_memory_desc_init_by_strides,
           (dnnl_memory_desc_t * a, int b, const dnnl_dims_t c, dnnl_data_type_t d,
            const dnnl_dims_t e),
           a, b, c, d, e)
MK_FORWARD(dnnl_matmul_desc_init,
           (dnnl_matmul_desc_t * a, const dnnl_memory_desc_t* b, const dnnl_memory_desc_t* c,
            const dnnl_memory_desc_t* d, const dnnl_memory_desc_t* e),
           a, b, c, d, e)
MK_FORWARD(dnnl_post_ops_create, (dnnl_post_ops_t * a), a)
MK_FORWARD(dnnl_post_ops_destroy, (dnnl_post_ops_t a), a)
MK_FORWARD(dnnl_post_ops_append_sum, (dnnl_post_ops_t a, float b), a, b)
MK_FORWARD(dnnl_primitive_attr_create, (dnnl_primitive_attr_t * a), a)
MK_FORWARD(dnnl_primitive_attr_destroy, (dnnl_primitive_attr_t a), a)
MK_FORWARD(dnnl_primitive_attr_set_post_ops, (dnnl_primitive_attr_t a, const_dnnl_post_ops_t b), a,
           b)
MK_FORWARD(dnnl_primitive_attr_set_scratchpad_mode,
           (dnnl_primitive_attr_t a, dnnl_scratchpad_mode_t b), a, b)
MK_FORWARD(dnnl_primitive_desc_iterator_create,
           (dnnl_primitive_desc_iterator_t * a, const_dnnl_op_desc_t b,
            const_dnnl_primitive_attr_t c, dnnl_engine_t d, const_dnnl_primitive_desc_t e),
           a, b, c, d, e)
MK_FORWARD(dnnl_primitive_desc_iterator_next, (dnnl_primitive_desc_iterator_t a), a)
MK_FORWARD(dnnl_primitive_desc_iterator_destroy, (dnnl_primitive_desc_iterator_t a), a)
MK_FORWARD(dnnl_primitive_desc_destroy, (dnnl_primitive_desc_t a), a)
MK_FORWARD(dnnl_primitive_desc_query,
           (const_dnnl_primitive_desc_t a, dnnl_query_t b, int c, void* d), a, b, c, d)
MK_FORWARD(dnnl_primitive_create, (dnnl_primitive_t * a, const_dnnl_primitive_desc_t b), a, b)
MK_FORWARD(dnnl_primitive_destroy, (dnnl_primitive_t a), a)
MK_FORWARD(dnnl_primitive_execute,
           (const_dnnl_primitive_t a, dnnl_stream_t b, int c, const dnnl_exec_arg_t* d), a, b, c, d)
#undef MK_FORWARD

extern "C" dnnl_primitive_desc_t DNNL_API
dnnl_primitive_desc_iterator_fetch(const_dnnl_primitive_desc_iterator_t iterator) {
  auto* const function =
      mk::find<decltype(dnnl_primitive_desc_iterator_fetch)>("dnnl_primitive_desc_iterator_fetch");
  return function == nullptr ? nullptr : function(iterator);
}

extern "C" const dnnl_memory_desc_t DNNL_API* dnnl_primitive_desc_query_md(
    const_dnnl_primitive_desc_t description, dnnl_query_t what, int index) {
  auto* const function =
      mk::find<decltype(dnnl_primitive_desc_query_md)>("dnnl_primitive_desc_query_md");
  return function == nullptr ? nullptr : function(description, what, index);
}

extern "C" size_t DNNL_API dnnl_memory_desc_get_size(const dnnl_memory_desc_t* description) {
  auto* const function = mk::find<decltype(dnnl_memory_desc_get_size)>("dnnl_memory_desc_get_size");
  return function == nullptr ? 0 : function(description);
}

// libgomp comes with oneDNN; without either nobody makes threads.
extern "C" int omp_get_max_threads();
extern "C" int omp_get_max_threads() {
  auto* const function = mk::find<int()>("omp_get_max_threads");
  return function == nullptr ? 1 : function();
}

extern "C" void omp_set_num_threads(int threads);
extern "C" void omp_set_num_threads(int threads) {
  if (auto* const function = mk::find<void(int)>("omp_set_num_threads")) function(threads);
}
