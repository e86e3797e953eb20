#include "daemon/doctor/gpu_page.h"

#include <dlfcn.h>

namespace mk::doctor {
namespace {

constexpr int kDevice = 0;
/// CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD of cuda.h, which is not needed to build this.
constexpr int kDmabufHandle = 1;

}  // namespace

Result<std::unique_ptr<GpuPage>> GpuPage::make() {
  std::unique_ptr<GpuPage> page(new GpuPage());
  MK_ASSIGN_OR_RETURN(page->driver_, gpu::load_driver());
  MK_ASSIGN_OR_RETURN(const gpu::DeviceUuid uuid, page->driver_->uuid_of(kDevice));
  page->gpu_ = gpu::text_of(uuid);
  MK_ASSIGN_OR_RETURN(page->stream_, page->driver_->make_stream(kDevice));  // we are on it now
  MK_ASSIGN_OR_RETURN(page->address_, page->driver_->allocate(kDevice, kBytes));
  page->export_dmabuf();
  return page;
}

GpuPage::~GpuPage() {
  dmabuf_.reset();
  if (address_ != nullptr) [[maybe_unused]]
    const Status freed = driver_->free(kDevice, address_);
  if (stream_ != nullptr) driver_->end_stream(kDevice, stream_);
}

void GpuPage::export_dmabuf() {
  // The driver interface has no use for it elsewhere; its library is loaded by now.
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  using Export = int (*)(void*, unsigned long long, std::size_t, int, unsigned long long);
  const auto call =
      library == nullptr
          ? nullptr
          : reinterpret_cast<Export>(::dlsym(library, "cuMemGetHandleForAddressRange"));
  if (call == nullptr) {
    dmabuf_trouble_ = "the CUDA driver is too old to export one";
  } else {
    int fd = -1;
    const int error =
        call(&fd, reinterpret_cast<unsigned long long>(address_), kBytes, kDmabufHandle, 0);
    if (error == 0) {
      dmabuf_ = UniqueFd(fd);
    } else {
      dmabuf_trouble_ = fmt::format("the CUDA driver exports none (error {})", error);
    }
  }
  if (library != nullptr) ::dlclose(library);
}

}  // namespace mk::doctor
