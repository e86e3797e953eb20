/// \file
/// Registered memory: ours, a peer's, and the table of ours that peers' keys are checked against.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "daemon/fabric/verbs/device.h"
#include "daemon/fabric/verbs/wire.h"

namespace mk::fabric::verbs {

/// The keys this endpoint has given out. Any thread.
class KeyTable {
 public:
  void add(const Key& key) {
    const std::lock_guard lock(mutex_);
    keys_[key.region] = key;
  }
  void remove(const Key& key) {
    const std::lock_guard lock(mutex_);
    keys_.erase(key.region);
  }
  /// Whether every byte is as it was given out, and the region is still registered.
  bool valid(const Key& key) const {
    const std::lock_guard lock(mutex_);
    const auto found = keys_.find(key.region);
    return found != keys_.end() && std::memcmp(&found->second, &key, sizeof key) == 0;
  }

 private:
  mutable std::mutex mutex_;
  std::map<Token, Key> keys_;
};

class VerbsLocalRegion final : public LocalRegion {
 public:
  VerbsLocalRegion(std::shared_ptr<const Device> device, std::shared_ptr<KeyTable> keys,
                   RegionHandle region, const Key& key)
      : device_(std::move(device)), keys_(std::move(keys)), region_(std::move(region)), key_(key) {
    keys_->add(key_);
  }
  ~VerbsLocalRegion() override { keys_->remove(key_); }
  Bytes key() const override { return to_blob(key_); }

  std::uint64_t address() const { return key_.address; }
  std::uint64_t bytes() const { return key_.bytes; }
  std::uint32_t local_key() const { return region_->lkey; }

 private:
  std::shared_ptr<const Device> device_;  ///< longer than the registration
  std::shared_ptr<KeyTable> keys_;
  RegionHandle region_;
  Key key_;
};

class VerbsRemoteRegion final : public RemoteRegion {
 public:
  explicit VerbsRemoteRegion(const Key& key) : key_(key) {}
  const Key& key() const { return key_; }

 private:
  Key key_;
};

}  // namespace mk::fabric::verbs
