#include "daemon/doctor/gpu_page.h"

namespace mk::doctor {
namespace {

constexpr int kDevice = 0;

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
  auto exported = driver_->dmabuf(kDevice, address_);
  if (exported) {
    dmabuf_ = std::move(exported->fd);
  } else {
    dmabuf_trouble_ = exported.error().message;
  }
}

}  // namespace mk::doctor
