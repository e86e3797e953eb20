/// \file
/// The few calls of NCCL that the baselines use, found at run time; NVLink multicast stays off.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace mk::test {

/// One communicator per device, all of this process. bf16 elements.
class Nccl {
 public:
  /// Null where there is no libnccl.
  static std::unique_ptr<Nccl> load(const std::vector<int>& devices);
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

  /// Between them, the following run as one.
  void begin();
  void end();
  /// By the numbers of the communicators, from 0 on.
  void send(std::size_t from, std::size_t to, const void* data, std::size_t count,
            cudaStream_t stream);
  void receive(std::size_t at, std::size_t from, void* data, std::size_t count,
               cudaStream_t stream);
  /// To be called for every member.
  void reduce(std::size_t at, std::size_t root, const void* data, void* sum, std::size_t count,
              cudaStream_t stream);

 private:
  struct Api;
  Nccl();
  std::unique_ptr<Api> api_;
  std::vector<void*> communicators_;
};

}  // namespace mk::test
