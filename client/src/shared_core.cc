#include "client/src/shared_core.h"

#include <algorithm>

namespace mk {

bool OperatorCore::join() {
  std::uint32_t users = users_.load(std::memory_order_relaxed);
  do {
    // With none left the core is on its way out.
    if (users == 0 || (users & kClaimed) != 0) return false;
  } while (!users_.compare_exchange_weak(users, users + 1, std::memory_order_acq_rel));
  return true;
}

bool OperatorCore::claim() {
  std::uint32_t users = 1;
  return users_.compare_exchange_strong(users, 1 | kClaimed, std::memory_order_acq_rel) ||
         users == (1 | kClaimed);
}

bool SharedCores::is_another(std::string_view kind) {
  std::lock_guard lock(mutex_);
  return !kinds_.emplace(kind).second;
}

std::pair<std::shared_ptr<OperatorCore>, std::string> SharedCores::joined(const Request& request) {
  std::lock_guard lock(mutex_);
  std::erase_if(entries_, [](const Entry& entry) { return entry.core.expired(); });
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    std::shared_ptr<OperatorCore> core = entry->core.lock();
    if (core == nullptr || !entry->request->equals(request)) continue;
    if (core->usable() && core->join()) return {std::move(core), entry->tag};
  }
  return {};
}

Result<std::shared_ptr<OperatorCore>> SharedCores::agree(Session::Impl& session,
                                                         const std::string& tag,
                                                         const Request* request) {
  std::shared_ptr<OperatorCore> core;
  std::string found;  // not a structured binding: clang 14 captures none in a lambda
  if (request != nullptr) std::tie(core, found) = joined(*request);
  if (core != nullptr) found += request->details(*core);
  if (session.options().world == 1) return core;
  const auto blobs =
      session.exchange(tag, std::as_bytes(std::span(found)), session.options().timeout);
  const bool all = blobs && core != nullptr && std::ranges::all_of(*blobs, [&](const auto& blob) {
                     return std::ranges::equal(blob, std::as_bytes(std::span(found)));
                   });
  if (all) return core;
  if (core != nullptr) core->leave();
  if (!blobs) return propagate(blobs);
  return std::shared_ptr<OperatorCore>();
}

void SharedCores::keep(const std::string& tag, std::unique_ptr<const Request> request,
                       const std::shared_ptr<OperatorCore>& core) {
  std::lock_guard lock(mutex_);
  entries_.push_back({tag, std::move(request), core});
}

}  // namespace mk
