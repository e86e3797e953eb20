#include "daemon/fabric/ofi/flusher.h"

#include <algorithm>

namespace mk::fabric::ofi {

Result<std::unique_ptr<Flusher>> Flusher::open(const Domain& domain) {
  std::unique_ptr<Flusher> made(new Flusher);
  MK_ASSIGN_OR_RETURN(made->sink_region_,
                      domain.register_local(made->sink_.data(), made->sink_.size(), FI_READ));
  MK_ASSIGN_OR_RETURN(made->port_, domain.open_port(2 * kDepth));
  std::array<std::byte, 256> name{};
  std::size_t bytes = name.size();
  if (const int rc = ::fi_getname(&made->port_.endpoint->fid, name.data(), &bytes))
    return fail_fi(rc, "provider {} does not tell its endpoint's address", domain.provider());
  if (const int rc =
          ::fi_av_insert(made->port_.addresses.get(), name.data(), 1, &made->self_, 0, nullptr);
      rc != 1) {
    return fail_fi(rc < 0 ? rc : -FI_EADDRNOTAVAIL, "provider {} takes no address of its own",
                   domain.provider());
  }
  for (Read& read : made->reads_) made->free_.push_back(&read);
  return made;
}

bool Flusher::flush(const OfiLocalRegion& region, std::uint64_t cookie) {
  if (free_.empty()) return false;
  Read& read = *free_.back();
  read.cookie = cookie;
  void* const sink = sink_region_ ? ::fi_mr_desc(sink_region_.get()) : nullptr;
  // An error here is tried again with the next poll, like one of the read itself.
  if (::fi_read(port_.endpoint.get(), sink_.data(), 1, sink, self_, region.wire_base(),
                region.wire_key(), &read.context) != 0)
    return false;
  free_.pop_back();
  return true;
}

Event Flusher::end(void* context, ErrorCode code) {
  Read& read = *reinterpret_cast<Read*>(context);  // its first member
  free_.push_back(&read);
  return {Event::Kind::kFlushed, 0, read.cookie, 0, code};
}

std::size_t Flusher::poll(std::span<Event> events) {
  if (free_.size() == reads_.size() || events.empty()) return 0;
  std::array<fi_cq_data_entry, 32> entries;
  const ssize_t got = ::fi_cq_read(port_.completions.get(), entries.data(),
                                   std::min(events.size(), entries.size()));
  std::size_t count = 0;
  for (ssize_t i = 0; i < got; ++i)
    events[count++] = end(entries[static_cast<std::size_t>(i)].op_context, ErrorCode::kOk);
  fi_cq_err_entry error{};
  if (got == -FI_EAVAIL && ::fi_cq_readerr(port_.completions.get(), &error, 0) > 0)
    events[count++] = end(error.op_context, ErrorCode::kLinkDown);
  return count;
}

}  // namespace mk::fabric::ofi
