/// \file
/// What a rank says of the launch that it is in, for users: words of its segment that the daemon
/// reads without asking the client. Nothing else goes by them, so a wrong word harms nobody.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shm/atomic.h"
#include "shm/platform.h"

namespace mk::shm {

/// What a block does: the place of its word in Progress::roles. (kernels/comm/wait.h: Role.)
inline constexpr std::uint32_t kProgressRoles = 8;
inline constexpr std::string_view kProgressRoleNames[kProgressRoles] = {
    "compute", "reduce", "send", "receive", "collect", "share", "plan", "pull"};
/// What a wait is for. (FlagKind there.)
inline constexpr std::string_view kProgressWaitNames[] = {
    "its launch",     "a tile",      "a sum of its node", "a result",
    "an arrival",     "a free bank", "a ring's slot",     "bytes to be sent",
    "its own blocks", "its end",     "rows of tokens",    "the plan",
    "packed rows",    "shards sent", "rows passed on",    "indexed rows"};
inline constexpr std::uint32_t kProgressWaits =
    sizeof(kProgressWaitNames) / sizeof(kProgressWaitNames[0]);

/// Progress::op: its place here; 0: not told.
inline constexpr std::string_view kProgressOperators[] = {"",
                                                          "ag_gemm",
                                                          "gemm_rs",
                                                          "gemm_ar",
                                                          "moe_dispatch",
                                                          "gemm_combine",
                                                          "ring_attention",
                                                          "all_gather",
                                                          "reduce_scatter"};
inline constexpr std::uint32_t kProgressOperatorCount =
    sizeof(kProgressOperators) / sizeof(kProgressOperators[0]);
/// What Progress::sizes are of each operator; "": nothing.
inline constexpr std::uint32_t kProgressSizes = 4;
inline constexpr std::string_view kProgressSizeNames[kProgressOperatorCount][kProgressSizes] = {
    {"", "", "", ""},
    {"n", "k", "", ""},
    {"n", "k", "", ""},
    {"n", "k", "", ""},
    {"n", "k", "experts", "top_k"},
    {"n", "k", "experts", "top_k"},
    {"heads", "key_heads", "head_dim", "batch"},
    {"row_bytes", "", "", ""},
    {"n", "", "", ""}};
constexpr std::uint32_t progress_operator(std::string_view name) {
  for (std::uint32_t op = 1; op < kProgressOperatorCount; ++op) {
    if (kProgressOperators[op] == name) return op;
  }
  return 0;
}

/// The words. Each is written by the client alone, and read as it stands. Counts are of this rank
/// and of one launch.
struct Progress {
  // line 0: what the launch is, before it begins
  std::uint32_t op;
  std::uint32_t epoch;   ///< the operator's launches so far, with this one
  std::uint64_t tag;     ///< the caller's; 0: none
  std::uint32_t m;       ///< rows (tokens) of this rank's launch, as the caller counts them
  std::uint32_t tiles;   ///< to compute; 0: not told, or not known yet
  std::uint32_t chunks;  ///< to send to other nodes; 0: not told, or none
  std::uint32_t reserved0;
  std::uint32_t sizes[kProgressSizes];  ///< the rest of its shape: kProgressSizeNames
  std::uint64_t reserved1[2];
  // line 1: how far it is
  std::uint32_t tiles_done;
  std::uint32_t chunks_done;
  std::uint64_t reserved2[7];
  // line 2: who of it works and who waits
  std::uint64_t roles[kProgressRoles];  ///< of RoleWord
};
static_assert(sizeof(Progress) == 192);

/// What a word of Progress::roles says of a role's blocks.
struct RoleWord {
  std::uint32_t running = 0;  ///< blocks that have begun and not ended
  std::uint32_t waiting = 0;  ///< those of them that wait, and not just for an instant
  std::uint32_t rank = 0;     ///< whom one of those waits for; perhaps this rank itself
  std::uint32_t wait = 0;     ///< its place in kProgressWaitNames
  std::uint32_t hops = 0;     ///< ranks that may stand between `rank` and the cause

  friend constexpr bool operator==(const RoleWord&, const RoleWord&) = default;
};
MK_HOST_DEVICE constexpr std::uint64_t encode(const RoleWord& word) {
  return (word.running & 0xffffull) | (word.waiting & 0xffffull) << 16 |
         (word.rank & 0xffffull) << 32 | (word.wait & 0xffull) << 48 | (word.hops & 0xffull) << 56;
}
MK_HOST_DEVICE constexpr RoleWord decode_role(std::uint64_t word) {
  RoleWord role;
  role.running = static_cast<std::uint32_t>(word & 0xffff);
  role.waiting = static_cast<std::uint32_t>(word >> 16 & 0xffff);
  role.rank = static_cast<std::uint32_t>(word >> 32 & 0xffff);
  role.wait = static_cast<std::uint32_t>(word >> 48 & 0xff);
  role.hops = static_cast<std::uint32_t>(word >> 56);
  return role;
}

/// One block's way to its rank's words. Those of a role are shared by the threads of its blocks.
struct BlockProgress {
  Progress* words = nullptr;  ///< null: nobody reads them
  std::uint32_t role = 0;
  bool waits = false;

  MK_HOST_DEVICE void begin() const { count(1, 0); }
  MK_HOST_DEVICE void end() { count(-1, waits ? -1 : 0), waits = false; }
  /// Now, and for a while already.
  MK_HOST_DEVICE void wait_for(std::uint32_t rank, std::uint32_t wait, std::uint32_t hops) {
    if (words == nullptr) return;
    const std::uint32_t more = waits ? 0 : 1;
    waits = true;
    change([&](RoleWord& role_word) {
      role_word.waiting += more;
      role_word.rank = rank;
      role_word.wait = wait;
      role_word.hops = hops;
    });
  }
  MK_HOST_DEVICE void go_on() {
    if (!waits) return;
    waits = false;
    count(0, -1);
  }
  MK_HOST_DEVICE void tile_done() const {
    if (words != nullptr) fetch_add(&words->tiles_done, 1u);
  }
  MK_HOST_DEVICE void chunk_done() const {
    if (words != nullptr) fetch_add(&words->chunks_done, 1u);
  }

 private:
  MK_HOST_DEVICE void count(int running, int waiting) const {
    if (words == nullptr) return;
    change([&](RoleWord& role_word) {
      role_word.running += static_cast<std::uint32_t>(running);
      role_word.waiting += static_cast<std::uint32_t>(waiting);
    });
  }
  template <class Change>
  MK_HOST_DEVICE void change(Change&& how) const {
    std::uint64_t* const word = &words->roles[role];
    for (std::uint64_t old = load_relaxed(word);; old = load_relaxed(word)) {
      RoleWord changed = decode_role(old);
      how(changed);
      if (compare_exchange(word, old, encode(changed))) return;
    }
  }
};

}  // namespace mk::shm
