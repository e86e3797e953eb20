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

/// What is registered at one opening of the port, by the keys that were given out. Any thread.
class KeyTable {
 public:
  explicit KeyTable(std::shared_ptr<const Device> device) : device_(std::move(device)) {}

  /// Keeps `pieces` registered until `remove` or `clear`; an error after that.
  Status add(const Key& key, std::vector<RegionHandle> pieces);
  void remove(const Token& region);
  /// Whether a key of that region and digest was given out, and the region is still registered.
  bool valid(const Token& region, std::uint64_t digest) const;
  /// The port is lost: all is deregistered, and nothing comes any more.
  void clear();

 private:
  struct Entry {
    std::uint64_t digest = 0;
    std::vector<RegionHandle> pieces;
  };
  mutable std::mutex mutex_;
  std::shared_ptr<const Device> device_;  ///< longer than the regions; null: lost
  std::map<Token, Entry> entries_;
};

/// Registers `memory` at `domain`, in pieces of 2^`piece_shift` bytes: a mapped range, or a GPU's
/// by the file that stands for it. All or nothing.
Result<std::vector<RegionHandle>> register_pieces(ibv_pd* domain, std::string_view port,
                                                  const MemoryDescriptor& memory,
                                                  std::uint32_t piece_shift, unsigned access);

/// What ends with a region: its key is no longer valid, and the NIC forgets it.
class Registration {
 public:
  Registration(std::shared_ptr<KeyTable> keys, const Token& region)
      : keys_(std::move(keys)), region_(region) {}
  ~Registration() { keys_->remove(region_); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  const std::shared_ptr<KeyTable> keys_;
  const Token region_;
};

class VerbsLocalRegion final : public LocalRegion {
 public:
  /// `opening`: of the port, at which it is registered. `registration`: null in tests that have no
  /// NIC.
  VerbsLocalRegion(const Key& key, std::vector<std::uint32_t> local_keys, std::uint32_t opening,
                   std::unique_ptr<Registration> registration)
      : key_(key),
        local_keys_(std::move(local_keys)),
        opening_(opening),
        registration_(std::move(registration)) {}
  Bytes key() const override { return to_blob(key_); }

  /// Links of another opening cannot use it.
  std::uint32_t opening() const { return opening_; }
  std::uint64_t address() const { return key_.address; }
  std::uint64_t bytes() const { return key_.bytes; }
  std::uint32_t local_key(std::uint64_t offset) const { return local_keys_[key_.piece_of(offset)]; }
  std::uint64_t left_in_piece(std::uint64_t offset) const { return key_.left_in_piece(offset); }
  std::uint32_t remote_key(std::uint64_t offset) const { return key_.rkey(offset); }

 private:
  Key key_;
  std::vector<std::uint32_t> local_keys_;  ///< by piece
  std::uint32_t opening_;
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
