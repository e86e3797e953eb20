/// \file
/// One rank for unlike_test.cc:
///
///   multiprocess_unlike SOCKET JOB NODES LOCAL RANK SEED
///
/// attaches and runs operators that are not alike in a random order
/// (tests/client/unlike_operators.h). It reports on descriptor 3: "done", or "error CODE SENTENCE".

#include <cstdlib>
#include <string>

#include "client/tools/launch/process.h"
#include "mkernel/mkernel.h"
#include "tests/client/unlike_operators.h"

namespace {

mk::Status run(const mk::AttachOptions& place, std::uint64_t seed) {
  auto session = mk::Session::attach(place);
  if (!session) return tl::unexpected<mk::Error>(session.error());
  const mk::Status right = mk::test::run_unlike_operators(*session, mk::DataType::kBf16, seed, 80);
  if (!right) return right;
  return session->detach();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  const auto number = [argv](int i) { return static_cast<std::uint32_t>(std::atoi(argv[i])); };
  auto place = mk::AttachOptions::of_rank(argv[2], number(5), number(3), number(4));
  place.socket = argv[1];
  place.timeout = std::chrono::seconds{60};
  const mk::Status status = run(place, std::strtoull(argv[6], nullptr, 10));
  const std::string line = status
                               ? "done"
                               : std::string("error ") + mk::error_code_name(status.error().code) +
                                     " " + status.error().message;
  return mk::tools::report_line(mk::tools::kReportFd, line) && status ? 0 : 1;
}
