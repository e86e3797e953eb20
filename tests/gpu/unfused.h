/// \file
/// The unfused way that the operators are compared with: cuBLAS, and a collective before or after.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/gpu/cublas.h"
#include "tests/gpu/daemon_nodes.h"
#include "tests/gpu/nccl.h"
#include "tests/gpu/operator_ranks.h"

namespace mk::test {

/// For a job whose ranks have a device each. Calls queue work on all ranks' streams.
class Unfused {
 public:
  explicit Unfused(Job& job);
  virtual ~Unfused();
  Unfused(const Unfused&) = delete;
  Unfused& operator=(const Unfused&) = delete;

  /// All ranks' products, by cuBLAS.
  void products();
  virtual bool has_collective() const { return false; }
  virtual void collective() {}
  void both();
  /// Whether all that was awaited came.
  virtual bool right() const { return true; }

 protected:
  void* allocate(std::uint32_t rank, std::uint64_t bytes);

  Job& job_;
  std::vector<void*> whole_;  ///< the gathered A, or the partial C
  std::vector<void*> out_;    ///< the result

 private:
  std::vector<std::unique_ptr<Cublas>> cublas_;
  std::vector<DeviceMemory> memory_;
};

/// One node: a collective of NCCL.
class UnfusedOverNccl final : public Unfused {
 public:
  UnfusedOverNccl(Job& job, Nccl& nccl) : Unfused(job), nccl_(nccl) {}
  bool has_collective() const override { return true; }
  void collective() override;

 private:
  Nccl& nccl_;
};

/// Two nodes: NCCL within each, the daemons' rails between them, in pieces that follow each other
/// through both:
///  - gather: all shards leave for the rail peers at once; meanwhile the node gathers its own; then
///    each piece goes to the node's others when it has come;
///  - reduce-scatter: the other node's shards are reduced first, and each piece leaves when it is;
///    then the own ones; then each piece that comes is added;
///  - all-reduce: each piece is reduced and scattered, and its quarters leave for the rail peers;
///    then each that has come is added and gathered.
/// Source and target lie in memory the daemons know; a gather's shard lies there from the start.
class UnfusedOverNodes final : public Unfused {
 public:
  /// Pieces are of `piece_bytes` of each rank's, but at most kPiecesMax.
  UnfusedOverNodes(Job& job, DaemonNodes& daemons, const std::vector<Nccl*>& nccl,
                   std::uint64_t piece_bytes);
  bool has_collective() const override { return true; }
  void collective() override;
  bool right() const override;
  std::uint32_t pieces() const { return pieces_; }

 private:
  static constexpr std::uint32_t kPiecesMax = 8;
  std::byte* at(std::uint32_t rank, std::uint64_t offset) const;
  void send(std::uint32_t rank, std::uint32_t piece, std::uint64_t source, std::uint64_t target);
  void await(std::uint32_t rank, std::uint32_t piece);
  void gather();
  void reduce_scatter();
  void all_reduce();

  const std::vector<Nccl*> nccl_;  ///< by node
  std::uint32_t locals_;
  std::uint64_t part_ = 0;  ///< elements of one rank: its shard; of an all-reduce its quarter
  std::uint32_t pieces_ = 1;
  std::uint64_t piece_ = 0;  ///< elements of a piece of a part
  std::uint32_t epoch_ = 0;
  std::vector<kernels::RankContext> contexts_;
  std::vector<void*> kept_;
  std::vector<std::uint32_t*> missed_;
};

}  // namespace mk::test
