/// \file
/// Equal operators of a session have one core: workspace, flags, blocks or kernels, and one
/// sequence of epochs and banks. A session's operators launch one after the other, so a core sees
/// no more than several launches in a row, which it is made for. A model with many layers of one
/// shape so takes the memory of one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "client/src/session_impl.h"

namespace mk {

/// What an operator class keeps in its core derives from this.
class OperatorCore {
 public:
  virtual ~OperatorCore() = default;
  /// Whether it can still launch: an operator joins no core that a failed launch has broken.
  virtual bool usable() const = 0;

  // The operators that have it. Atomic, without a lock: a forked child leaves cores, too.

  /// One more operator, unless an operator has it to itself.
  bool join();
  void leave() { users_.fetch_sub(1, std::memory_order_acq_rel); }
  /// Gives it to its only operator for good: true, unless others have it, too. What is kept in it
  /// between launches (a shard in place, a result read in place) is safe from then on.
  bool claim();

 private:
  static constexpr std::uint32_t kClaimed = 1u << 31;
  std::atomic<std::uint32_t> users_{1};
};

/// One operator's share of a core. The core goes with the last of them.
template <class Core>
class CoreShare {
 public:
  CoreShare() = default;
  /// Takes over what `join` or the core's creation has counted.
  explicit CoreShare(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  CoreShare(CoreShare&& other) noexcept : core_(std::move(other.core_)) {}
  CoreShare& operator=(CoreShare&& other) noexcept {
    std::swap(core_, other.core_);
    return *this;
  }
  ~CoreShare() {
    if (core_ != nullptr) core_->leave();
  }
  Core* operator->() const { return core_.get(); }
  Core& operator*() const { return *core_; }

 private:
  std::shared_ptr<Core> core_;
};

/// The cores of a session that further operators may join.
class SharedCores {
 public:
  /// What the caller asked for: an operator joins the core of an equal one. Ranks may differ in it;
  /// it is enough that each finds the core it made together with the others.
  struct Request {
    virtual ~Request() = default;
    virtual bool equals(const Request& other) const = 0;
    /// In what else ranks must be alike to share it.
    virtual std::string details(const OperatorCore& /*found*/) const { return {}; }
  };
  template <class... Parts>
  struct RequestOf final : Request {
    explicit RequestOf(const Parts&... given) : parts(given...) {}
    bool equals(const Request& other) const override {
      const auto* const same = dynamic_cast<const RequestOf*>(&other);
      return same != nullptr && same->parts == parts;
    }
    std::tuple<Parts...> parts;
  };

  /// The core for an operator of `kind` as the `parts` ask for it: an equal operator's, if all
  /// ranks have one that they made together, else what `make()` makes, a
  /// Result<std::shared_ptr<Core>>. Collective. `own`: on this rank no other operator may have it.
  template <class Core, class Make, class... Parts>
  static Result<CoreShare<Core>> find_or_make(Session::Impl& session, std::string_view kind,
                                              bool own, Make&& make, const Parts&... parts) {
    return find_or_make<Core>(session, kind, own, std::forward<Make>(make),
                              std::unique_ptr<Request>(new RequestOf<Parts...>(parts...)));
  }
  /// The same for any request.
  template <class Core, class Make>
  static Result<CoreShare<Core>> find_or_make(Session::Impl& session, std::string_view kind,
                                              bool own, Make&& make,
                                              std::unique_ptr<Request> request) {
    SharedCores& cores = session.shared_cores();
    const std::string tag = session.next_operator_tag(kind);
    std::shared_ptr<OperatorCore> found;
    if (cores.is_another(kind)) {
      MK_ASSIGN_OR_RETURN(found, cores.agree(session, tag, own ? nullptr : request.get()));
    }
    if (found != nullptr) return CoreShare<Core>(std::static_pointer_cast<Core>(std::move(found)));
    MK_ASSIGN_OR_RETURN(std::shared_ptr<Core> made, make());
    if (own) {
      made->claim();
    } else {
      cores.keep(tag, std::move(request), made);
    }
    return CoreShare<Core>(std::move(made));
  }

 private:
  struct Entry {
    std::string tag;  ///< of the creation, the same on all ranks
    std::unique_ptr<const Request> request;
    std::weak_ptr<OperatorCore> core;
  };

  /// Whether there has been an operator of that kind: creations are collective. So all ranks know
  /// alike that before the first one there is nothing to agree on.
  bool is_another(std::string_view kind);
  /// The joined core that all ranks found, or null.
  Result<std::shared_ptr<OperatorCore>> agree(Session::Impl& session, const std::string& tag,
                                              const Request* request);
  /// The newest that fits, joined, with its tag; or null.
  std::pair<std::shared_ptr<OperatorCore>, std::string> joined(const Request& request);
  void keep(const std::string& tag, std::unique_ptr<const Request> request,
            const std::shared_ptr<OperatorCore>& core);

  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::set<std::string, std::less<>> kinds_;
};

}  // namespace mk
