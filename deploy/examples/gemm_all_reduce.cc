// A whole job: C = sum over all ranks of A_r B_r, under whichever launcher starts it (torchrun,
// srun, mpirun, or by hand with MKERNEL_*). Each rank draws its own A_r and B_r, and checks rows of
// C against sums that it makes from everybody's seeds.
//
//   gemm_all_reduce [M N K [seconds]]: launches at least once, and again until the seconds are over
#include <mkernel/mkernel.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace {

/// -1, 0 and 1: sums of at most kExactMax products are whole numbers that bf16 holds exactly, in
/// whatever order and with whatever rounding on the way they are made. So the check is for
/// equality.
constexpr std::uint64_t kExactMax = 256;

std::vector<std::uint16_t> draw(std::uint32_t seed, std::uint64_t count) {
  std::mt19937 random(seed);
  std::vector<std::uint16_t> values(count);
  for (std::uint16_t& value : values) {
    const float number = static_cast<float>(static_cast<int>(random() % 3) - 1);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    value = static_cast<std::uint16_t>(bits >> 16);
  }
  return values;
}

double value_of(std::uint16_t bf16) {
  const std::uint32_t bits = std::uint32_t{bf16} << 16;
  float number = 0;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

struct Matrices {
  std::vector<std::uint16_t> a, b;
  Matrices(std::uint32_t rank, std::uint64_t m, std::uint64_t n, std::uint64_t k)
      : a(draw(2 * rank, m * k)), b(draw(2 * rank + 1, k * n)) {}
};

int fail(const char* what, const mk::Error& error) {
  std::fprintf(stderr, "%s: %s\n", what, error.message.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t m = argc > 3 ? std::strtoull(argv[1], nullptr, 10) : 256;
  const std::uint64_t n = argc > 3 ? std::strtoull(argv[2], nullptr, 10) : 256;
  const std::uint64_t k = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 64;
  const double seconds = argc > 4 ? std::strtod(argv[4], nullptr) : 0;

  const auto options = mk::AttachOptions::from_environment();
  if (!options) return fail("environment", options.error());
  if (k * options->world > kExactMax) {
    std::fprintf(stderr, "K times the number of ranks may be %llu at most\n",
                 static_cast<unsigned long long>(kExactMax));
    return 2;
  }
  auto session = mk::Session::attach(*options);
  if (!session) return fail("attach", session.error());
  auto op = mk::GemmAllReduce::create(*session, {.m_max = m, .n = n, .k = k});
  if (!op) return fail("create", op.error());

  const Matrices mine(options->rank, m, n, k);
  std::vector<std::uint16_t> c(m * n);
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::uint64_t launches = 0;
  // All ranks must launch equally often: they agree on the end by what rank 0 says.
  for (bool more = true; more; ++launches) {
    const auto stats = op->launch(mine.a.data(), mine.b.data(), c.data(), m);
    if (!stats) return fail("launch", stats.error());
    const bool wanted = seconds > 0 && std::chrono::steady_clock::now() < until;
    const std::byte word{wanted ? std::uint8_t{1} : std::uint8_t{0}};
    const auto words = session->exchange("more", {&word, 1});
    if (!words) return fail("exchange", words.error());
    more = words->at(0).at(0) == std::byte{1};
  }

  // Every rank checks its own share of the rows.
  const mk::RowRange rows = mk::rows_of_rank(m, options->world, options->rank);
  std::vector<double> expected(rows.count * n);
  for (std::uint32_t rank = 0; rank < options->world; ++rank) {
    const Matrices theirs(rank, m, n, k);
    for (std::uint64_t row = 0; row < rows.count; ++row) {
      for (std::uint64_t i = 0; i < k; ++i) {
        const double a = value_of(theirs.a[(rows.first + row) * k + i]);
        for (std::uint64_t column = 0; column < n; ++column) {
          expected[row * n + column] += a * value_of(theirs.b[i * n + column]);
        }
      }
    }
  }
  for (std::uint64_t i = 0; i < expected.size(); ++i) {
    const double got = value_of(c[rows.first * n + i]);
    if (got != expected[i]) {
      std::fprintf(stderr, "rank %u: C[%llu] is %g, expected %g\n", options->rank,
                   static_cast<unsigned long long>(rows.first * n + i), got, expected[i]);
      return 1;
    }
  }
  std::printf("rank %u of %u (node %u of %u): %llu launches, %llu elements checked\n",
              options->rank, options->world, options->node_rank, options->nodes,
              static_cast<unsigned long long>(launches),
              static_cast<unsigned long long>(expected.size()));
  return 0;
}
