/// \file
/// Registered memory: ours, a peer's, and the table of ours that peers' keys are checked against.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

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
  /// Whether a key of that region and digest was given out, and the region is still registered.
  bool valid(const Token& region, std::uint64_t digest) const {
    const std::lock_guard lock(mutex_);
    const auto found = keys_.find(region);
    return found != keys_.end() && found->second.digest() == digest;
  }

 private:
  mutable std::mutex mutex_;
  std::map<Token, Key> keys_;
};

/// Registers `memory` at `domain`, in pieces of 2^`piece_shift` bytes: a mapped range, or a GPU's
/// by the file that stands for it. All or nothing.
Result<std::vector<RegionHandle>> register_pieces(ibv_pd* domain, std::string_view port,
                                                  const MemoryDescriptor& memory,
                                                  std::uint32_t piece_shift, unsigned access);

/// What ends with a region: its key is no longer valid, then the NIC forgets it.
class Registration {
 public:
  Registration(std::shared_ptr<const Device> device, std::shared_ptr<KeyTable> keys,
               std::vector<RegionHandle> pieces, const Key& key)
      : device_(std::move(device)), keys_(std::move(keys)), pieces_(std::move(pieces)), key_(key) {
    keys_->add(key_);
  }
  ~Registration() { keys_->remove(key_); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  std::shared_ptr<const Device> device_;  ///< longer than the region
  std::shared_ptr<KeyTable> keys_;
  std::vector<RegionHandle> pieces_;
  Key key_;
};

class VerbsLocalRegion final : public LocalRegion {
 public:
  /// `registration`: null in tests that have no NIC.
  VerbsLocalRegion(const Key& key, std::vector<std::uint32_t> local_keys,
                   std::unique_ptr<Registration> registration)
      : key_(key), local_keys_(std::move(local_keys)), registration_(std::move(registration)) {}
  Bytes key() const override { return to_blob(key_); }

  std::uint64_t address() const { return key_.address; }
  std::uint64_t bytes() const { return key_.bytes; }
  std::uint32_t local_key(std::uint64_t offset) const { return local_keys_[key_.piece_of(offset)]; }
  std::uint64_t left_in_piece(std::uint64_t offset) const { return key_.left_in_piece(offset); }
  std::uint32_t remote_key(std::uint64_t offset) const { return key_.rkey(offset); }

 private:
  Key key_;
  std::vector<std::uint32_t> local_keys_;  ///< by piece
  std::unique_ptr<Registration> registration_;
};

class VerbsRemoteRegion final : public RemoteRegion {
 public:
  explicit VerbsRemoteRegion(const Key& key) : key_(key) {}
  const Key& key() const { return key_; }

 private:
  Key key_;
};

}  // namespace mk::fabric::verbs
