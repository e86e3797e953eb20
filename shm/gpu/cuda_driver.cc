/// \file
/// The CUDA driver behind the interface: libcuda.so.1, opened at run time. Its few types are
/// spelled out here, so that no CUDA header is needed to build. Contexts are the devices' primary
/// ones, which the CUDA runtime uses as well.

#include <dlfcn.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "shm/gpu/driver.h"

namespace mk::gpu {
namespace {

using CuResult = int;
using CuContext = struct CuContextTag*;
using CuAddress = unsigned long long;
constexpr CuResult kSuccess = 0;
constexpr CuResult kNotReady = 600;
constexpr CuResult kPeerAccessAlreadyEnabled = 704;
constexpr unsigned kStreamNonBlocking = 1;
constexpr int kRelaxedCaptures = 2;
constexpr unsigned kIpcLazyPeerAccess = 1;
constexpr unsigned kHostPortable = 1;
constexpr unsigned kHostDeviceMap = 2;
/// CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
constexpr int kDmabufHandle = 1;

/// The functions we use, under their versioned names, which never change their meaning.
struct Functions {
  CuResult (*Init)(unsigned);
  CuResult (*GetErrorName)(CuResult, const char**);
  CuResult (*GetErrorString)(CuResult, const char**);
  CuResult (*DeviceGetCount)(int*);
  CuResult (*DeviceGet)(int*, int);
  CuResult (*DeviceGetUuid_v2)(DeviceUuid*, int);
  CuResult (*DevicePrimaryCtxRetain)(CuContext*, int);
  CuResult (*DevicePrimaryCtxRelease_v2)(int);
  CuResult (*CtxGetCurrent)(CuContext*);
  CuResult (*CtxSetCurrent)(CuContext);
  CuResult (*CtxPushCurrent_v2)(CuContext);
  CuResult (*CtxPopCurrent_v2)(CuContext*);
  CuResult (*CtxGetDevice)(int*);
  CuResult (*ThreadExchangeStreamCaptureMode)(int*);
  CuResult (*CtxEnablePeerAccess)(CuContext, unsigned);
  CuResult (*MemAlloc_v2)(CuAddress*, std::size_t);
  CuResult (*MemFree_v2)(CuAddress);
  CuResult (*MemGetInfo_v2)(std::size_t*, std::size_t*);
  CuResult (*MemGetAddressRange_v2)(CuAddress*, std::size_t*, CuAddress);
  CuResult (*MemGetHandleForAddressRange)(void*, CuAddress, std::size_t, int, unsigned long long);
  CuResult (*MemsetD8Async)(CuAddress, unsigned char, std::size_t, Stream);
  CuResult (*IpcGetMemHandle)(IpcHandle*, CuAddress);
  CuResult (*IpcOpenMemHandle_v2)(CuAddress*, IpcHandle, unsigned);
  CuResult (*IpcCloseMemHandle)(CuAddress);
  CuResult (*MemHostRegister_v2)(void*, std::size_t, unsigned);
  CuResult (*MemHostUnregister)(void*);
  CuResult (*MemHostGetDevicePointer_v2)(CuAddress*, void*, unsigned);
  CuResult (*MemcpyDtoHAsync_v2)(void*, CuAddress, std::size_t, Stream);
  CuResult (*MemcpyHtoDAsync_v2)(CuAddress, const void*, std::size_t, Stream);
  CuResult (*MemcpyDtoDAsync_v2)(CuAddress, CuAddress, std::size_t, Stream);
  CuResult (*StreamCreate)(Stream*, unsigned);
  CuResult (*StreamDestroy_v2)(Stream);
  CuResult (*StreamSynchronize)(Stream);
  CuResult (*StreamQuery)(Stream);
  CuResult (*StreamWriteValue32_v2)(Stream, CuAddress, std::uint32_t, unsigned);
};

template <class F>
bool find(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(::dlsym(library, name));
  return function != nullptr;
}

/// The name of the first function that is missing; null: all are there.
const char* find_all(void* library, Functions& f) {
  const char* missing = nullptr;
#define MK_FIND(name) \
  if (missing == nullptr && !find(library, "cu" #name, f.name)) missing = "cu" #name
  MK_FIND(Init);
  MK_FIND(GetErrorName);
  MK_FIND(GetErrorString);
  MK_FIND(DeviceGetCount);
  MK_FIND(DeviceGet);
  MK_FIND(DeviceGetUuid_v2);
  MK_FIND(DevicePrimaryCtxRetain);
  MK_FIND(DevicePrimaryCtxRelease_v2);
  MK_FIND(CtxGetCurrent);
  MK_FIND(CtxSetCurrent);
  MK_FIND(CtxPushCurrent_v2);
  MK_FIND(CtxPopCurrent_v2);
  MK_FIND(CtxGetDevice);
  MK_FIND(ThreadExchangeStreamCaptureMode);
  MK_FIND(CtxEnablePeerAccess);
  MK_FIND(MemAlloc_v2);
  MK_FIND(MemFree_v2);
  MK_FIND(MemGetInfo_v2);
  MK_FIND(MemGetAddressRange_v2);
  MK_FIND(MemGetHandleForAddressRange);
  MK_FIND(MemsetD8Async);
  MK_FIND(IpcGetMemHandle);
  MK_FIND(IpcOpenMemHandle_v2);
  MK_FIND(IpcCloseMemHandle);
  MK_FIND(MemHostRegister_v2);
  MK_FIND(MemHostUnregister);
  MK_FIND(MemHostGetDevicePointer_v2);
  MK_FIND(MemcpyDtoHAsync_v2);
  MK_FIND(MemcpyHtoDAsync_v2);
  MK_FIND(MemcpyDtoDAsync_v2);
  MK_FIND(StreamCreate);
  MK_FIND(StreamDestroy_v2);
  MK_FIND(StreamSynchronize);
  MK_FIND(StreamQuery);
  MK_FIND(StreamWriteValue32_v2);
#undef MK_FIND
  return missing;
}

CuAddress address(const std::byte* memory) { return reinterpret_cast<CuAddress>(memory); }
std::byte* pointer(CuAddress address) { return reinterpret_cast<std::byte*>(address); }

class CudaDriver final : public Driver {
 public:
  static Result<std::shared_ptr<Driver>> load();
  ~CudaDriver() override;

  Result<int> device_of(const DeviceUuid& uuid) override;
  Result<DeviceUuid> uuid_of(int device) override;
  int devices() override { return count_; }
  Status choose_device(int device) override { return enter(device); }
  Result<int> current_device() override;

  Result<std::byte*> allocate(int device, std::uint64_t bytes) override;
  Result<MemoryRoom> room(int device) override;
  Status free(int device, std::byte* memory) override;
  Result<IpcHandle> share(int device, std::byte* memory) override;
  Result<Dmabuf> dmabuf(int device, std::byte* memory) override;
  Result<std::byte*> open(int device, const IpcHandle& handle) override;
  Status close(int device, std::byte* memory) override;
  Result<std::uint64_t> bytes_of(int device, std::byte* memory) override;
  Status reach(int device, int other) override;
  Result<std::byte*> pin(int device, void* pages, std::uint64_t bytes) override;
  Status unpin(int device, void* pages) override;
  Status fetch(int device, void* to, const std::byte* from, std::uint64_t bytes) override;
  Status store(int device, std::byte* to, const void* from, std::uint64_t bytes) override;

  Result<Stream> make_stream(int device) override;
  void end_stream(int device, Stream stream) override;
  Status copy(int device, Stream stream, std::byte* to, const std::byte* from,
              std::uint64_t bytes) override;
  Status write_word(int device, Stream stream, std::byte* word, std::uint32_t value) override;
  Result<bool> idle(int device, Stream stream) override;

 private:
  /// One device's primary context, and a stream for set-up, which no kernel of a rank holds up.
  struct Device {
    CuContext context = nullptr;
    Stream stream = nullptr;
  };
  /// Makes a device current for a scope. There a thread may allocate and free while the user's
  /// threads capture, which CUDA else refuses it, and ends their captures.
  class Current {
   public:
    Current(const Functions& f, CuContext context) : f_(f), entered_(f.CtxPushCurrent_v2(context)) {
      f_.ThreadExchangeStreamCaptureMode(&captures_);
    }
    ~Current() {
      f_.ThreadExchangeStreamCaptureMode(&captures_);
      CuContext mine = nullptr;
      if (entered_ == kSuccess) f_.CtxPopCurrent_v2(&mine);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Functions& f_;
    const CuResult entered_;
    int captures_ = kRelaxedCaptures;  ///< the mode to come back to
  };

  Error error(CuResult result, const char* what, int device) const {
    const char* name = nullptr;
    const char* text = nullptr;
    f_.GetErrorName(result, &name);
    f_.GetErrorString(result, &text);
    return {ErrorCode::kSystem,
            fmt::format("GPU {}: {}: {} ({})", device, what, text != nullptr ? text : "unknown",
                        name != nullptr ? name : "unknown error")};
  }
  Status check(CuResult result, const char* what, int device) const {
    if (result == kSuccess) return {};
    return tl::unexpected<Error>(error(result, what, device));
  }
  Result<Device> use(int device);
  /// Leaves the thread on the device.
  Status enter(int device) {
    MK_ASSIGN_OR_RETURN(const Device used, use(device));
    return check(f_.CtxSetCurrent(used.context), "cannot use its context", device);
  }

  void* library_ = nullptr;  ///< never closed: a driver that was started stays
  Functions f_{};
  int count_ = 0;
  std::mutex mutex_;
  std::map<int, Device> devices_;
};

Result<std::shared_ptr<Driver>> CudaDriver::load() {
  auto driver = std::make_shared<CudaDriver>();
  driver->library_ = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver->library_ == nullptr) {
    return fail(ErrorCode::kUnavailable,
                "there is no CUDA driver on this machine (libcuda.so.1 cannot be loaded: {}); GPU "
                "memory needs NVIDIA's driver",
                ::dlerror());
  }
  Functions& f = driver->f_;
  if (const char* const missing = find_all(driver->library_, f); missing != nullptr) {
    return fail(ErrorCode::kUnavailable,
                "the CUDA driver of this machine is too old: it lacks {}; CUDA 12 or later is "
                "needed",
                missing);
  }
  const CuResult started = f.Init(0);
  if (started != kSuccess || f.DeviceGetCount(&driver->count_) != kSuccess || driver->count_ == 0) {
    driver->count_ = 0;
    const char* name = nullptr;
    if (started != kSuccess) f.GetErrorName(started, &name);
    return fail(ErrorCode::kUnavailable, "the CUDA driver finds no GPU ({})",
                name != nullptr ? name : "is CUDA_VISIBLE_DEVICES empty?");
  }
  return driver;
}

CudaDriver::~CudaDriver() {
  for (auto& [number, device] : devices_) {
    {
      const Current current(f_, device.context);
      if (device.stream != nullptr) f_.StreamDestroy_v2(device.stream);
    }
    f_.DevicePrimaryCtxRelease_v2(number);
  }
}

Result<CudaDriver::Device> CudaDriver::use(int device) {
  if (device < 0 || device >= count_) {
    return fail(ErrorCode::kInvalidArgument, "there is no GPU {}; this process sees {}", device,
                count_);
  }
  const std::lock_guard lock(mutex_);
  if (const auto found = devices_.find(device); found != devices_.end()) return found->second;
  Device made;
  MK_RETURN_IF_ERROR(
      check(f_.DevicePrimaryCtxRetain(&made.context, device), "cannot be used", device));
  CuResult result = kSuccess;
  {
    const Current current(f_, made.context);
    result = f_.StreamCreate(&made.stream, kStreamNonBlocking);
  }
  if (result != kSuccess) {
    f_.DevicePrimaryCtxRelease_v2(device);
    return tl::unexpected<Error>(error(result, "cannot make a stream", device));
  }
  devices_.emplace(device, made);
  return made;
}

Result<int> CudaDriver::device_of(const DeviceUuid& uuid) {
  for (int device = 0; device < count_; ++device) {
    DeviceUuid other;
    if (f_.DeviceGetUuid_v2(&other, device) == kSuccess && other == uuid) return device;
  }
  return fail(ErrorCode::kNotFound,
              "{} is not among the {} GPUs this process sees; is CUDA_VISIBLE_DEVICES (or the "
              "container's set of devices) narrower than the owner's?",
              text_of(uuid), count_);
}

Result<DeviceUuid> CudaDriver::uuid_of(int device) {
  DeviceUuid uuid;
  MK_RETURN_IF_ERROR(check(f_.DeviceGetUuid_v2(&uuid, device), "has no UUID", device));
  return uuid;
}

Result<int> CudaDriver::current_device() {
  CuContext context = nullptr;
  int device = 0;
  if (f_.CtxGetCurrent(&context) == kSuccess && context != nullptr &&
      f_.CtxGetDevice(&device) == kSuccess)
    return device;
  return 0;
}

Result<std::byte*> CudaDriver::allocate(int device, std::uint64_t bytes) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  CuAddress memory = 0;
  MK_RETURN_IF_ERROR(check(f_.MemAlloc_v2(&memory, bytes),
                           fmt::format("cannot allocate {} bytes", bytes).c_str(), device));
  CuResult result = f_.MemsetD8Async(memory, 0, bytes, used.stream);
  if (result == kSuccess) result = f_.StreamSynchronize(used.stream);
  if (result != kSuccess) {
    f_.MemFree_v2(memory);
    return tl::unexpected<Error>(error(result, "cannot clear new memory", device));
  }
  return pointer(memory);
}

Result<MemoryRoom> CudaDriver::room(int device) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  std::size_t available = 0;
  std::size_t total = 0;
  MK_RETURN_IF_ERROR(
      check(f_.MemGetInfo_v2(&available, &total), "cannot ask for its memory", device));
  return MemoryRoom{available, total};
}

Status CudaDriver::free(int device, std::byte* memory) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  return check(f_.MemFree_v2(address(memory)), "cannot free memory", device);
}

Result<IpcHandle> CudaDriver::share(int device, std::byte* memory) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  IpcHandle handle;
  MK_RETURN_IF_ERROR(check(f_.IpcGetMemHandle(&handle, address(memory)),
                           "cannot share memory with other processes (CUDA IPC)", device));
  return handle;
}

Result<Dmabuf> CudaDriver::dmabuf(int device, std::byte* memory) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  CuAddress begin = 0;
  std::size_t bytes = 0;
  MK_RETURN_IF_ERROR(check(f_.MemGetAddressRange_v2(&begin, &bytes, address(memory)),
                           "does not know the extent of memory", device));
  // Exported are whole pages of the host, from the allocation's first.
  const auto page = static_cast<CuAddress>(::sysconf(_SC_PAGESIZE));
  const CuAddress first = begin / page * page;
  const CuAddress end = (begin + bytes + page - 1) / page * page;
  int fd = -1;
  const CuResult result = f_.MemGetHandleForAddressRange(&fd, first, end - first, kDmabufHandle, 0);
  if (result != kSuccess) {
    Error why = error(result, "exports no dmabuf", device);
    why.code = ErrorCode::kUnsupported;
    return tl::unexpected<Error>(std::move(why));
  }
  return Dmabuf{UniqueFd(fd), address(memory) - first};
}

Result<std::byte*> CudaDriver::open(int device, const IpcHandle& handle) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  CuAddress memory = 0;
  MK_RETURN_IF_ERROR(check(f_.IpcOpenMemHandle_v2(&memory, handle, kIpcLazyPeerAccess),
                           "cannot open another process's memory by CUDA IPC; both must run on "
                           "this host, their containers must share the IPC namespace, and the "
                           "owner must be alive",
                           device));
  return pointer(memory);
}

Status CudaDriver::close(int device, std::byte* memory) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  return check(f_.IpcCloseMemHandle(address(memory)), "cannot close another process's memory",
               device);
}

Result<std::uint64_t> CudaDriver::bytes_of(int device, std::byte* memory) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  CuAddress begin = 0;
  std::size_t bytes = 0;
  MK_RETURN_IF_ERROR(check(f_.MemGetAddressRange_v2(&begin, &bytes, address(memory)),
                           "does not know the extent of memory", device));
  return begin + bytes - address(memory);
}

Status CudaDriver::reach(int device, int other) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  MK_ASSIGN_OR_RETURN(const Device peer, use(other));
  const Current current(f_, used.context);
  const CuResult result = f_.CtxEnablePeerAccess(peer.context, 0);
  if (result == kPeerAccessAlreadyEnabled) return {};
  return check(result, fmt::format("cannot reach the memory of GPU {}", other).c_str(), device);
}

Result<std::byte*> CudaDriver::pin(int device, void* pages, std::uint64_t bytes) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  MK_RETURN_IF_ERROR(check(f_.MemHostRegister_v2(pages, bytes, kHostPortable | kHostDeviceMap),
                           "cannot pin host memory (ulimit -l, or the container's limit of locked "
                           "memory)",
                           device));
  CuAddress seen = 0;
  const CuResult result = f_.MemHostGetDevicePointer_v2(&seen, pages, 0);
  if (result != kSuccess) {
    f_.MemHostUnregister(pages);
    return tl::unexpected<Error>(error(result, "cannot map pinned host memory", device));
  }
  return pointer(seen);
}

Status CudaDriver::unpin(int device, void* pages) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  return check(f_.MemHostUnregister(pages), "cannot release pinned host memory", device);
}

Status CudaDriver::fetch(int device, void* to, const std::byte* from, std::uint64_t bytes) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  MK_RETURN_IF_ERROR(
      check(f_.MemcpyDtoHAsync_v2(to, address(from), bytes, used.stream), "cannot copy", device));
  return check(f_.StreamSynchronize(used.stream), "cannot copy", device);
}

Status CudaDriver::store(int device, std::byte* to, const void* from, std::uint64_t bytes) {
  MK_ASSIGN_OR_RETURN(const Device used, use(device));
  const Current current(f_, used.context);
  MK_RETURN_IF_ERROR(
      check(f_.MemcpyHtoDAsync_v2(address(to), from, bytes, used.stream), "cannot copy", device));
  return check(f_.StreamSynchronize(used.stream), "cannot copy", device);
}

Result<Stream> CudaDriver::make_stream(int device) {
  MK_RETURN_IF_ERROR(enter(device));
  Stream stream = nullptr;
  MK_RETURN_IF_ERROR(
      check(f_.StreamCreate(&stream, kStreamNonBlocking), "cannot make a stream", device));
  return stream;
}

void CudaDriver::end_stream(int device, Stream stream) {
  if (!enter(device)) return;
  f_.StreamSynchronize(stream);
  f_.StreamDestroy_v2(stream);
}

Status CudaDriver::copy(int device, Stream stream, std::byte* to, const std::byte* from,
                        std::uint64_t bytes) {
  MK_RETURN_IF_ERROR(enter(device));
  return check(f_.MemcpyDtoDAsync_v2(address(to), address(from), bytes, stream), "cannot copy",
               device);
}

Status CudaDriver::write_word(int device, Stream stream, std::byte* word, std::uint32_t value) {
  MK_RETURN_IF_ERROR(enter(device));
  // Flags 0: everything before it in the stream is visible to the whole system first.
  return check(f_.StreamWriteValue32_v2(stream, address(word), value, 0), "cannot write a word",
               device);
}

Result<bool> CudaDriver::idle(int device, Stream stream) {
  MK_RETURN_IF_ERROR(enter(device));
  const CuResult result = f_.StreamQuery(stream);
  if (result == kNotReady) return false;
  MK_RETURN_IF_ERROR(check(result, "a copy failed", device));
  return true;
}

}  // namespace

std::string text_of(const DeviceUuid& uuid) {
  std::string text = "GPU-";
  for (std::size_t i = 0; i < uuid.bytes.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned>(uuid.bytes[i]));
  }
  return text;
}

Result<std::shared_ptr<Driver>> load_driver() {
  static std::mutex mutex;
  static std::weak_ptr<Driver> loaded;
  const std::lock_guard lock(mutex);
  if (auto driver = loaded.lock()) return driver;
  MK_ASSIGN_OR_RETURN(auto driver, CudaDriver::load());
  loaded = driver;
  return driver;
}

}  // namespace mk::gpu
