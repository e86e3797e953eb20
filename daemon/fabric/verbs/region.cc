#include "daemon/fabric/verbs/region.h"

#include <algorithm>

namespace mk::fabric::verbs {

Result<std::vector<RegionHandle>> register_pieces(ibv_pd* domain, std::string_view port,
                                                  const MemoryDescriptor& memory,
                                                  std::uint32_t piece_shift, unsigned access) {
  const std::uint64_t piece = std::uint64_t{1} << piece_shift;
  std::vector<RegionHandle> pieces;
  for (std::uint64_t at = 0; at < memory.bytes; at += piece) {
    const std::uint64_t bytes = std::min(piece, memory.bytes - at);
    std::byte* const address = memory.address + at;
    // What the network calls the GPU's memory is what its owner calls it: so the place within a
    // page is the same in the file and on the wire, as the kernel demands.
    RegionHandle region(memory.direct == GpuWindow::kDmabuf
                            ? ::ibv_reg_dmabuf_mr(domain, memory.dmabuf_offset + at, bytes,
                                                  reinterpret_cast<std::uint64_t>(address),
                                                  memory.dmabuf, static_cast<int>(access))
                            : ::ibv_reg_mr(domain, address, bytes, access));
    if (!region) {
      return fail_verb(errno, "RDMA port {} does not register {} bytes of {}", port, bytes,
                       memory.direct == GpuWindow::kNone ? "memory" : "GPU memory");
    }
    pieces.push_back(std::move(region));
  }
  return pieces;
}

}  // namespace mk::fabric::verbs
