// Two tensor-parallel layers trained by gradient descent: Y = relu(X W1) W2, with W1 split by
// columns over the ranks and W2 by rows. X and Y are split by rows (sequence parallelism).
//
//   forward   AllGather+GEMM (X, W1), then GEMM+ReduceScatter (relu, W2)
//   backward  AllGather+GEMM (dY, W2 transposed), whose gathered dY gives dW2; the gathered X gives
//             dW1. A layer before these would get its dX by GEMM+ReduceScatter (dH, W1 transposed).
//
// Started as gemm_all_reduce is, under any launcher. Every rank prints the same losses.
#include <mkernel/mkernel.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

namespace {

constexpr std::uint64_t kTokens = 64, kWidth = 32, kHidden = 128;
constexpr int kSteps = 40;
constexpr float kRate = 0.05F;

using Floats = std::vector<float>;
using Bf16s = std::vector<std::uint16_t>;

float widened(std::uint16_t bf16) {
  const std::uint32_t bits = std::uint32_t{bf16} << 16;
  float number = 0;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

Bf16s rounded(const Floats& numbers) {
  Bf16s result(numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &numbers[i], sizeof bits);
    result[i] = static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  return result;
}

Floats draw(std::uint32_t seed, std::uint64_t count, double scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, static_cast<float>(scale));
  Floats numbers(count);
  for (float& number : numbers) number = normal(random);
  return numbers;
}

/// weight -= rate * A^T B, with A rows x m and B rows x n: a gradient and its step.
void descend(Floats& weight, const Bf16s& a, const Bf16s& b, std::uint64_t m, std::uint64_t n) {
  for (std::uint64_t row = 0; row < kTokens; ++row) {
    for (std::uint64_t i = 0; i < m; ++i) {
      const float factor = kRate * widened(a[row * m + i]);
      for (std::uint64_t j = 0; j < n; ++j) weight[i * n + j] -= factor * widened(b[row * n + j]);
    }
  }
}

int fail(const char* what, const mk::Error& error) {
  std::fprintf(stderr, "%s: %s\n", what, error.message.c_str());
  return 1;
}

}  // namespace

int main() {
  const auto options = mk::AttachOptions::from_environment();
  if (!options) return fail("environment", options.error());
  auto session = mk::Session::attach(*options);
  if (!session) return fail("attach", session.error());
  if (kHidden % options->world != 0) {
    std::fprintf(stderr, "%u ranks do not divide %d hidden features\n", options->world,
                 static_cast<int>(kHidden));
    return 2;
  }
  const std::uint64_t share = kHidden / options->world;
  auto up = mk::AllGatherGemm::create(*session, {.m_max = kTokens, .n = share, .k = kWidth});
  if (!up) return fail("create", up.error());
  auto down = mk::GemmReduceScatter::create(*session, {.m_max = kTokens, .n = kWidth, .k = share});
  if (!down) return fail("create", down.error());
  // W2 as it lies, share x width, is its transpose in the layout n x k.
  auto back = mk::AllGatherGemm::create(
      *session, {.m_max = kTokens, .n = share, .k = kWidth, .b_layout = mk::BLayout::kNK});
  if (!back) return fail("create", back.error());

  const mk::RowRange rows = mk::rows_of_rank(kTokens, options->world, options->rank);
  const Floats all = draw(1, kTokens * kWidth, 1);
  const Floats mine(all.begin() + static_cast<std::ptrdiff_t>(rows.first * kWidth),
                    all.begin() + static_cast<std::ptrdiff_t>((rows.first + rows.count) * kWidth));
  const Bf16s x = rounded(mine);
  Floats w1 = draw(100 + options->rank, kWidth * share, 1 / std::sqrt(double{kWidth}));
  Floats w2 = draw(200 + options->rank, share * kWidth, 1 / std::sqrt(double{kHidden}));

  Bf16s gathered_x(kTokens * kWidth), hidden(kTokens * share), y(rows.count * kWidth);
  Bf16s gathered_dy(kTokens * kWidth), dhidden(kTokens * share);
  for (int step = 0; step < kSteps; ++step) {
    const Bf16s half1 = rounded(w1), half2 = rounded(w2);
    if (auto done = up->launch(x.data(), half1.data(), hidden.data(), kTokens,
                               mk::LaunchMode::kAuto, gathered_x.data());
        !done)
      return fail("up", done.error());
    for (std::uint16_t& value : hidden) value = widened(value) > 0 ? value : std::uint16_t{0};
    if (auto done = down->launch(hidden.data(), half2.data(), y.data(), kTokens); !done)
      return fail("down", done.error());

    // The layers are to learn tanh, element by element.
    Floats dy(y.size());
    double loss = 0;
    for (std::size_t i = 0; i < dy.size(); ++i) {
      const float difference = widened(y[i]) - std::tanh(mine[i]);
      loss += double{difference} * difference / (kTokens * kWidth);
      dy[i] = 2 * difference / kTokens;
    }

    if (auto done = back->launch(rounded(dy).data(), half2.data(), dhidden.data(), kTokens,
                                 mk::LaunchMode::kAuto, gathered_dy.data());
        !done)
      return fail("back", done.error());
    for (std::size_t i = 0; i < dhidden.size(); ++i) {
      if (hidden[i] == 0) dhidden[i] = 0;
    }
    descend(w2, hidden, gathered_dy, share, kWidth);
    descend(w1, gathered_x, dhidden, kWidth, share);

    std::byte blob[sizeof loss];
    std::memcpy(blob, &loss, sizeof loss);
    const auto losses = session->exchange("loss", blob);
    if (!losses) return fail("exchange", losses.error());
    double total = 0;
    for (const auto& bytes : *losses) {
      double part = 0;
      std::memcpy(&part, bytes.data(), sizeof part);
      total += part;
    }
    if (step % 10 == 0 || step == kSteps - 1)
      std::printf("rank %u: step %d: loss %.4f\n", options->rank, step, total);
  }
  return 0;
}
