/// \file
/// The few calls of NCCL that the baselines use, found at run time; NVLink multicast stays off.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace mk::test {

/// One communicator per device 0 .. devices - 1, all of this process. bf16 elements.
class Nccl {
 public:
  /// Null where there is no libnccl.
  static std::unique_ptr<Nccl> load(int devices);
  ~Nccl();
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  /// One per device, in device order; each on its stream.
  struct Call {
    const void* send;
    void* receive;
    cudaStream_t stream;
  };
  /// `count`: elements of one rank's part.
  void all_gather(const std::vector<Call>& calls, std::size_t count);
  void reduce_scatter(const std::vector<Call>& calls, std::size_t count);
  /// `count`: of the whole.
  void all_reduce(const std::vector<Call>& calls, std::size_t count);

 private:
  struct Api;
  Nccl();
  std::unique_ptr<Api> api_;
  std::vector<void*> communicators_;
};

}  // namespace mk::test
