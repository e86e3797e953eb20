#include "tests/gpu/nccl.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

namespace mk::test {
namespace {

constexpr int kBf16 = 9;
constexpr int kSum = 0;

}  // namespace

struct Nccl::Api {
  int (*init_all)(void**, int, const int*);
  int (*destroy)(void*);
  int (*group_start)();
  int (*group_end)();
  int (*all_gather)(const void*, void*, std::size_t, int, void*, cudaStream_t);
  int (*reduce_scatter)(const void*, void*, std::size_t, int, int, void*, cudaStream_t);
  int (*all_reduce)(const void*, void*, std::size_t, int, int, void*, cudaStream_t);
  int (*send)(const void*, std::size_t, int, int, void*, cudaStream_t);
  int (*receive)(void*, std::size_t, int, int, void*, cudaStream_t);
  int (*reduce)(const void*, void*, std::size_t, int, int, int, void*, cudaStream_t);
  const char* (*error_string)(int);

  void require(int result, const char* what) const {
    if (result == 0) return;
    fmt::print(stderr, "{}: {}\n", what, error_string(result));
    std::exit(1);
  }
};

Nccl::Nccl() : api_(std::make_unique<Api>()) {}

std::unique_ptr<Nccl> Nccl::load(const std::vector<int>& devices) {
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  std::unique_ptr<Nccl> nccl(new Nccl);
  Api& api = *nccl->api_;
  bool complete = true;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    complete = complete && function != nullptr;
  };
  find(api.init_all, "ncclCommInitAll");
  find(api.destroy, "ncclCommDestroy");
  find(api.group_start, "ncclGroupStart");
  find(api.group_end, "ncclGroupEnd");
  find(api.all_gather, "ncclAllGather");
  find(api.reduce_scatter, "ncclReduceScatter");
  find(api.all_reduce, "ncclAllReduce");
  find(api.send, "ncclSend");
  find(api.receive, "ncclRecv");
  find(api.reduce, "ncclReduce");
  find(api.error_string, "ncclGetErrorString");
  if (!complete) return nullptr;
  nccl->communicators_.resize(devices.size());
  api.require(
      api.init_all(nccl->communicators_.data(), static_cast<int>(devices.size()), devices.data()),
      "ncclCommInitAll");
  return nccl;
}

Nccl::~Nccl() {
  for (void* communicator : communicators_) api_->destroy(communicator);
}

void Nccl::all_gather(const std::vector<Call>& calls, std::size_t count) {
  api_->require(api_->group_start(), "ncclGroupStart");
  for (std::size_t r = 0; r < calls.size(); ++r) {
    api_->require(api_->all_gather(calls[r].send, calls[r].receive, count, kBf16, communicators_[r],
                                   calls[r].stream),
                  "ncclAllGather");
  }
  api_->require(api_->group_end(), "ncclGroupEnd");
}

void Nccl::reduce_scatter(const std::vector<Call>& calls, std::size_t count) {
  api_->require(api_->group_start(), "ncclGroupStart");
  for (std::size_t r = 0; r < calls.size(); ++r) {
    api_->require(api_->reduce_scatter(calls[r].send, calls[r].receive, count, kBf16, kSum,
                                       communicators_[r], calls[r].stream),
                  "ncclReduceScatter");
  }
  api_->require(api_->group_end(), "ncclGroupEnd");
}

void Nccl::all_reduce(const std::vector<Call>& calls, std::size_t count) {
  api_->require(api_->group_start(), "ncclGroupStart");
  for (std::size_t r = 0; r < calls.size(); ++r) {
    api_->require(api_->all_reduce(calls[r].send, calls[r].receive, count, kBf16, kSum,
                                   communicators_[r], calls[r].stream),
                  "ncclAllReduce");
  }
  api_->require(api_->group_end(), "ncclGroupEnd");
}

void Nccl::begin() { api_->require(api_->group_start(), "ncclGroupStart"); }
void Nccl::end() { api_->require(api_->group_end(), "ncclGroupEnd"); }

void Nccl::send(std::size_t from, std::size_t to, const void* data, std::size_t count,
                cudaStream_t stream) {
  api_->require(api_->send(data, count, kBf16, static_cast<int>(to), communicators_[from], stream),
                "ncclSend");
}

void Nccl::receive(std::size_t at, std::size_t from, void* data, std::size_t count,
                   cudaStream_t stream) {
  api_->require(
      api_->receive(data, count, kBf16, static_cast<int>(from), communicators_[at], stream),
      "ncclRecv");
}

void Nccl::reduce(std::size_t at, std::size_t root, const void* data, void* sum, std::size_t count,
                  cudaStream_t stream) {
  api_->require(api_->reduce(data, sum, count, kBf16, kSum, static_cast<int>(root),
                             communicators_[at], stream),
                "ncclReduce");
}

}  // namespace mk::test
