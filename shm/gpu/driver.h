/// \file
/// The parts of a GPU that mkernel needs besides its kernels. They are memory that other processes
/// can open, host memory that the GPU can reach, and copies on streams. An interface, so that tests
/// put host memory in its place; `load_driver` answers the machine's own, found at run time.
/// Nothing here needs CUDA to build, to link or to start.
///
/// Devices are named by the numbers that this process knows them by, and by their UUID between
/// processes (CUDA_VISIBLE_DEVICES renumbers them). Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "shm/host/result.h"
#include "shm/host/unique_fd.h"

namespace mk::gpu {

struct DeviceUuid {
  std::array<std::byte, 16> bytes{};
  friend bool operator==(const DeviceUuid&, const DeviceUuid&) = default;
};
/// "GPU-01234567-89ab-cdef-0123-456789abcdef", as nvidia-smi writes it.
std::string text_of(const DeviceUuid& uuid);

/// What opens an allocation in another process of this host (CUDA IPC).
struct IpcHandle {
  std::array<std::byte, 64> bytes{};
  friend bool operator==(const IpcHandle&, const IpcHandle&) = default;
};

/// A file that stands for a GPU's memory: devices that can reach it (RDMA NICs) register it by
/// that. The memory stays for as long as they do, or anybody has the file.
struct Dmabuf {
  UniqueFd fd;
  std::uint64_t offset = 0;  ///< where in the file the memory asked for begins
};

/// Bytes of a device.
struct MemoryRoom {
  std::uint64_t available = 0;
  std::uint64_t total = 0;
};

/// A stream of one device.
struct StreamTag;
using Stream = StreamTag*;

class Driver {
 public:
  virtual ~Driver() = default;

  // -- devices --
  /// kNotFound when this process does not see the device.
  virtual Result<int> device_of(const DeviceUuid& uuid) = 0;
  virtual Result<DeviceUuid> uuid_of(int device) = 0;
  /// That this process sees; their numbers are below it.
  virtual int devices() = 0;
  /// The calling thread uses that device from now on, while the driver is held.
  virtual Status choose_device(int device) = 0;
  /// The device that the calling thread uses: the first unless it chose another (cudaSetDevice).
  virtual Result<int> current_device() = 0;

  // -- memory; the calling thread's own choice of a device stays as it was --
  /// Zeroed, an allocation of its own, so that `share` gives away nothing else.
  virtual Result<std::byte*> allocate(int device, std::uint64_t bytes) = 0;
  /// What may still be allocated, by whomever, and all there is.
  virtual Result<MemoryRoom> room(int device) = 0;
  virtual Status free(int device, std::byte* memory) = 0;
  /// Of a whole allocation, by its first byte.
  virtual Result<IpcHandle> share(int device, std::byte* memory) = 0;
  /// Of the whole allocation that `memory` lies in. kUnsupported where the driver exports none.
  virtual Result<Dmabuf> dmabuf(int device, std::byte* memory) = 0;
  /// Maps another process's allocation, on whatever device it lies, for use by `device`.
  virtual Result<std::byte*> open(int device, const IpcHandle& handle) = 0;
  virtual Status close(int device, std::byte* memory) = 0;
  /// Of the allocation, own or opened, that begins here.
  virtual Result<std::uint64_t> bytes_of(int device, std::byte* memory) = 0;
  /// Lets `device` use memory that this process has on `other`.
  virtual Status reach(int device, int other) = 0;
  /// Makes whole pages of mapped host memory usable by every device; answers where.
  virtual Result<std::byte*> pin(int device, void* pages, std::uint64_t bytes) = 0;
  virtual Status unpin(int device, void* pages) = 0;
  /// Copies that are over when they return. For set-up, not for the data path.
  virtual Status fetch(int device, void* to, const std::byte* from, std::uint64_t bytes) = 0;
  virtual Status store(int device, std::byte* to, const void* from, std::uint64_t bytes) = 0;

  // -- streams; leave the calling thread on the device: for threads of our own. None waits for the
  // GPU, but for `end_stream` --
  virtual Result<Stream> make_stream(int device) = 0;
  virtual void end_stream(int device, Stream stream) = 0;
  /// From device memory to device memory, in the stream's order.
  virtual Status copy(int device, Stream stream, std::byte* to, const std::byte* from,
                      std::uint64_t bytes) = 0;
  /// Stores a word when all before it in the stream is done and visible. `word`: a device address.
  virtual Status write_word(int device, Stream stream, std::byte* word, std::uint32_t value) = 0;
  /// Whether the stream has nothing left to do; an error when its work failed.
  virtual Result<bool> idle(int device, Stream stream) = 0;
};

/// This machine's CUDA driver; one for the process while anybody holds it. kUnavailable, with what
/// is missing, on a machine without one or without a GPU.
Result<std::shared_ptr<Driver>> load_driver();

}  // namespace mk::gpu
