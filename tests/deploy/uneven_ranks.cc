// A job in which one rank computes longer than the others inside every launch: its K is `times`
// theirs, which GEMM+AllReduce allows. What it computes is not looked at here.
//
//   uneven_ranks M N K rank times: until it is killed
#include <mkernel/mkernel.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const auto number = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
  const auto options = mk::AttachOptions::from_environment();
  if (!options) return 1;
  const std::uint64_t m = number(1), n = number(2);
  const std::uint64_t k = number(3) * (options->rank == number(4) ? number(5) : 1);
  auto session = mk::Session::attach(*options);
  if (!session) return std::puts(session.error().message.c_str()), 1;
  auto op = mk::GemmAllReduce::create(*session, {.m_max = m, .n = n, .k = k});
  if (!op) return std::puts(op.error().message.c_str()), 1;
  const std::vector<std::uint16_t> a(m * k), b(k * n);
  std::vector<std::uint16_t> c(m * n);
  for (;;) {
    mk::LaunchOptions how;
    how.tag = 7;
    const auto stats = op->launch({.a = a.data(), .b = b.data(), .c = c.data(), .m = m}, how);
    if (!stats) return std::puts(stats.error().message.c_str()), 1;
  }
}
