/// \file
/// One rank for the multi-process tests:
///
///   multiprocess_rank SOCKET JOB NODES LOCAL RANK LAUNCHES
///
/// attaches, makes a GEMM+AllReduce, and launches it LAUNCHES times (0: until something fails),
/// each with fresh inputs and every element of the result checked. It reports lines on descriptor
/// 3: "attached", "launch N" after each, "done", or "error CODE SENTENCE".

#include <cstdlib>
#include <string>
#include <vector>

#include "client/tools/launch/process.h"
#include "client/tools/numeric/gemm_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "mkernel/mkernel.h"

namespace mk {
namespace {

using Elements = std::vector<std::uint16_t>;

constexpr std::uint64_t kM = 96, kN = 128, kK = 64;

void say(const std::string& line) {
  if (!tools::report_line(tools::kReportFd, line)) std::_Exit(9);
}

tools::RandomMatrix matrix(std::uint32_t launch, std::uint32_t rank, bool b) {
  return {4711, std::uint64_t{launch} * 64 + rank * 2 + (b ? 1 : 0), b ? kN : kK, DataType::kBf16};
}

Status check(const AttachOptions& place, std::uint32_t launch, const Elements& c) {
  tools::GemmReference reference(kM, kN, place.nodes, place.local_size, DataType::kBf16);
  Elements a(kM * kK);
  Elements b(kK * kN);
  for (std::uint32_t rank = 0; rank < place.world; ++rank) {
    matrix(launch, rank, false).rows(0, kM, a.data());
    matrix(launch, rank, true).rows(0, kK, b.data());
    reference.add_rank(a.data(), b.data(), kK, 1, 1);
  }
  const auto comparison = reference.compare(c.data());
  if (comparison.wrong == 0) return {};
  return tl::unexpected<Error>(Error{
      ErrorCode::kInternal,
      std::to_string(comparison.wrong) + " wrong elements in launch " + std::to_string(launch)});
}

Status run(const AttachOptions& place, std::uint32_t launches) {
  auto session = Session::attach(place);
  if (!session) return tl::unexpected<Error>(session.error());
  say("attached");
  GemmAllReduce::Tuning tuning;
  tuning.wait_timeout = std::chrono::seconds{60};
  auto op = GemmAllReduce::create(*session, {kM, kN, kK, DataType::kBf16}, tuning);
  if (!op) return tl::unexpected<Error>(op.error());
  Elements a(kM * kK);
  Elements b(kK * kN);
  for (std::uint32_t launch = 0; launches == 0 || launch < launches; ++launch) {
    matrix(launch, place.rank, false).rows(0, kM, a.data());
    matrix(launch, place.rank, true).rows(0, kK, b.data());
    Elements c(kM * kN, 0xffff);
    // So small a product would always run unfused by itself.
    const LaunchMode mode = launch % 4 == 3 ? LaunchMode::kUnfused : LaunchMode::kFused;
    const auto stats = op->launch(a.data(), b.data(), c.data(), kM, mode);
    if (!stats) return tl::unexpected<Error>(stats.error());
    const Status right = check(place, launch, c);
    if (!right) return right;
    say("launch " + std::to_string(launch));
  }
  const Status barrier = session->barrier();
  if (!barrier) return barrier;
  return session->detach();
}

}  // namespace
}  // namespace mk

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  const auto number = [argv](int i) { return static_cast<std::uint32_t>(std::atoi(argv[i])); };
  auto place = mk::AttachOptions::of_rank(argv[2], number(5), number(3), number(4));
  place.socket = argv[1];
  place.timeout = std::chrono::seconds{60};
  const mk::Status status = mk::run(place, number(6));
  if (status) {
    mk::say("done");
    return 0;
  }
  mk::say(std::string("error ") + mk::error_code_name(status.error().code) + " " +
          status.error().message);
  return 1;
}
