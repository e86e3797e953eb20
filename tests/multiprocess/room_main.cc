/// \file
/// One rank for room_test.cc:
///
///   multiprocess_room SOCKET JOB NODES LOCAL RANK SEED WHAT PERCENT
///
/// attaches and creates a GEMM+AllReduce for which rank 1 has too little address space: PERCENT of
/// a workspace, and it maps two, its own and its local peer's. With WHAT "grow" there is a smaller
/// operator already, whose workspace the larger one would enlarge; with "first" there is none. Then
/// rank 1 has all it needs, the operator is created after all, and both are right. It reports on
/// descriptor 3: "refused CODE SENTENCE", and "done" or "error SENTENCE".

#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "client/tools/launch/process.h"
#include "client/tools/numeric/gemm_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "mkernel/mkernel.h"

namespace mk {
namespace {

constexpr std::uint64_t kK = 24;

[[noreturn]] void finish(const std::string& error) {
  tools::report_line(tools::kReportFd, error.empty() ? "done" : "error " + error);
  std::exit(error.empty() ? 0 : 1);
}

void require(const Status& status, const std::string& what) {
  if (!status) finish(what + ": " + status.error().message);
}

/// This process may have `bytes` more of address space than it has, and then as much as before.
class RoomFor {
 public:
  explicit RoomFor(std::uint64_t bytes) {
    std::uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    ::getrlimit(RLIMIT_AS, &before_);
    rlimit now = before_;
    now.rlim_cur = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) + bytes;
    if (::setrlimit(RLIMIT_AS, &now) != 0) finish("the address space cannot be limited");
  }
  ~RoomFor() { ::setrlimit(RLIMIT_AS, &before_); }
  RoomFor(const RoomFor&) = delete;
  RoomFor& operator=(const RoomFor&) = delete;

 private:
  rlimit before_{};
};

/// The job's products; rank by rank they differ.
class Rank {
 public:
  Rank(Session& session, std::uint64_t seed) : session_(session), seed_(seed) {}

  /// Every element of C, over what was poison.
  void launch(GemmAllReduce& op, std::uint64_t m, std::uint64_t n, const std::string& what) {
    const AttachOptions& at = session_.options();
    tools::GemmReference reference(m, n, at.nodes, at.local_size, DataType::kBf16);
    std::vector<std::uint16_t> a, b, c(m * n, 0xffff);
    ++launches_;
    for (std::uint32_t rank = 0; rank < at.world; ++rank) {
      const auto its_a = matrix(rank, false, m, kK);
      const auto its_b = matrix(rank, true, kK, n);
      reference.add_rank(its_a.data(), its_b.data(), kK, 1, 1);
      if (rank == at.rank) a = its_a, b = its_b;
    }
    const auto stats = op.launch(a.data(), b.data(), c.data(), m);
    if (!stats) finish(what + ": " + stats.error().message);
    const tools::Comparison result = reference.compare(c.data());
    if (result.wrong != 0 || result.compared != m * n)
      finish(what + ": " + std::to_string(result.wrong) + " wrong elements");
  }

 private:
  std::vector<std::uint16_t> matrix(std::uint32_t rank, bool b, std::uint64_t rows,
                                    std::uint64_t columns) const {
    std::vector<std::uint16_t> all(rows * columns);
    tools::RandomMatrix{seed_, launches_ * 1000 + rank * 2 + b, columns, DataType::kBf16}.rows(
        0, rows, all.data());
    return all;
  }

  Session& session_;
  const std::uint64_t seed_;
  std::uint32_t launches_ = 0;
};

void run(const AttachOptions& place, std::uint64_t seed, bool grow, std::uint64_t percent) {
  auto session = Session::attach(place);
  if (!session) finish(session.error().message);
  Rank rank(*session, seed);
  const GemmAllReduce::Shape small_shape{64, 72, kK};
  const GemmAllReduce::Shape large_shape{8192, 4096, kK};
  std::optional<GemmAllReduce> small;
  if (grow) {
    auto made = GemmAllReduce::create(*session, small_shape);
    if (!made) finish("the small one: " + made.error().message);
    small.emplace(std::move(*made));
    rank.launch(*small, 50, small_shape.n, "the small one");
  }
  const auto bytes = GemmAllReduce::workspace_bytes(*session, large_shape);
  if (!bytes) finish(bytes.error().message);
  require(session->barrier(), "before");
  {
    std::optional<RoomFor> room;
    if (place.rank == 1) room.emplace(*bytes / 100 * percent);
    const auto refused = GemmAllReduce::create(*session, large_shape);
    room.reset();
    if (refused) finish("the large one was created");
    tools::report_line(tools::kReportFd, std::string("refused ") +
                                             error_code_name(refused.error().code) + " " +
                                             refused.error().message);
  }
  require(session->barrier(), "after the refusal");
  if (small) rank.launch(*small, 64, small_shape.n, "the small one after the refusal");
  {
    auto large = GemmAllReduce::create(*session, large_shape);
    if (!large) finish("the large one: " + large.error().message);
    rank.launch(*large, 30, large_shape.n, "the large one");
    if (small) rank.launch(*small, 1, small_shape.n, "the small one at the end");
    require(session->barrier(), "at the end");
  }
  small.reset();
  require(session->detach(), "detaching");
}

}  // namespace
}  // namespace mk

int main(int argc, char** argv) {
  if (argc != 9) return 2;
  const auto number = [argv](int i) { return static_cast<std::uint32_t>(std::atoi(argv[i])); };
  auto place = mk::AttachOptions::of_rank(argv[2], number(5), number(3), number(4));
  place.socket = argv[1];
  place.timeout = std::chrono::seconds{60};
  mk::run(place, std::strtoull(argv[6], nullptr, 10), std::string(argv[7]) == "grow", number(8));
  mk::finish("");
}
