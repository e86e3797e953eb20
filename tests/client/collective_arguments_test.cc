// The collectives' C ABI with shapes and arguments that a seed draws, most of them wrong in some
// field: each is accepted and right, or refused with a sentence, and then nothing has changed.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops/registry.h"
#include "mkernel/mkernel.h"
#include "tests/client/c_calls.h"
#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::uint64_t kRows = 9, kColumns = 12;  // of a shape that is not refused, at most

class Drawn {
 public:
  explicit Drawn(std::uint64_t seed) : random_(seed) {}

  std::uint64_t below(std::uint64_t count) { return random_() % count; }
  bool once_in(std::uint64_t count) { return below(count) == 0; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(values.size())];
  }
  Bytes bytes(std::size_t count) {
    Bytes drawn(count);
    for (std::byte& byte : drawn) byte = static_cast<std::byte>(random_());
    return drawn;
  }

 private:
  std::mt19937_64 random_;
};

struct DrawnShape {
  mk_collective_shape shape;
  bool right = true;
};
DrawnShape draw_shape(Drawn& draw, bool sums) {
  DrawnShape drawn{sized<mk_collective_shape>()};
  mk_collective_shape& shape = drawn.shape;
  shape.m_max = 1 + draw.below(kRows);
  shape.n = 1 + draw.below(kColumns);
  shape.dtype = draw.one_of<std::uint32_t>({MK_BF16, MK_F16, MK_F32});
  if (sums) shape.partials = draw.one_of<std::uint32_t>({MK_PARTIALS_ELEMENT, MK_PARTIALS_F32});
  const auto spoil = [&](auto& field, auto wrong) {
    if (!draw.once_in(6)) return;
    field = wrong;
    drawn.right = false;
  };
  // A size beyond 32 bits must not be taken for its lower half.
  spoil(shape.m_max,
        draw.one_of<std::uint64_t>({0, std::uint64_t{1} << 32, (1ull << 32) + 3, ~0ull}));
  spoil(shape.n, draw.one_of<std::uint64_t>({0, std::uint64_t{1} << 32, (1ull << 63) + 8, ~0ull}));
  spoil(shape.dtype, draw.one_of<std::uint32_t>({0, 4, 0x80000001u, ~0u}));
  if (sums) spoil(shape.partials, draw.one_of<std::uint32_t>({2, 0x10000u, ~0u}));
  spoil(shape.struct_bytes, draw.one_of<std::size_t>({0, 1, 7, sizeof(std::size_t) - 1}));
  return drawn;
}

struct DrawnLaunch {
  mk_collective_arguments arguments;
  std::uint32_t mode = MK_AUTO;
  bool right = true;
};
/// `memory`: room for an input, and behind it for an output, of `bytes` each.
DrawnLaunch draw_launch(Drawn& draw, const mk_collective_shape& shape, Bytes& memory,
                        std::size_t bytes) {
  DrawnLaunch drawn{sized<mk_collective_arguments>()};
  mk_collective_arguments& arguments = drawn.arguments;
  const std::size_t row = shape.n * bytes_of(static_cast<DataType>(shape.dtype));
  arguments.m = 1 + draw.below(shape.m_max);
  arguments.input = memory.data();
  arguments.output = memory.data() + bytes;
  arguments.tag = draw.below(3);
  drawn.mode = draw.one_of<std::uint32_t>({MK_FUSED, MK_UNFUSED, MK_AUTO});
  const std::uint64_t m = arguments.m;
  const auto spoil = [&](auto change) {
    if (!draw.once_in(6)) return;
    change();
    drawn.right = false;
  };
  spoil([&] { arguments.input = nullptr; });
  spoil([&] { arguments.output = nullptr; });
  // It begins in the input's last row.
  spoil([&] { arguments.output = memory.data() + (m - 1) * row + row / 2 / 4 * 4; });
  spoil([&] { arguments.m = draw.one_of<std::uint64_t>({0, shape.m_max + 1, 1ull << 32, ~0ull}); });
  spoil([&] { drawn.mode = draw.one_of<std::uint32_t>({3, 0x100u, ~0u}); });
  spoil([&] { arguments.struct_bytes = draw.one_of<std::size_t>({0, 1, 7}); });
  return drawn;
}

void expect_a_sentence(mk_status status, const std::string& what) {
  EXPECT_NE(status, 0) << what;
  EXPECT_STREQ(error_code_name(ErrorCode::kInvalidArgument), mk_status_name(status)) << what;
  EXPECT_GT(std::string(mk_last_error()).size(), 20u) << what;
}

void launch_some(Drawn& draw, mk_op* op, const mk_collective_shape& shape, std::uint32_t& refused) {
  const std::size_t row = shape.n * bytes_of(static_cast<DataType>(shape.dtype));
  const std::size_t bytes = shape.m_max * row;
  for (int turn = 0; turn < 12; ++turn) {
    Bytes memory = draw.bytes(3 * bytes);
    if (shape.dtype != MK_F32) {
      // No NaN, which a sum of one rank may give another payload.
      for (std::size_t i = 1; i < bytes; i += 2) memory[i] &= std::byte{0x3b};
    }
    const Bytes before = memory;
    const DrawnLaunch launch = draw_launch(draw, shape, memory, bytes);
    const std::string what =
        fmt::format("m {} of {}, mode {}", launch.arguments.m, shape.m_max, launch.mode);
    const mk_status status = mk_op_launch(op, &launch.arguments, launch.mode, nullptr);
    if (!launch.right) {
      expect_a_sentence(status, what);
      EXPECT_EQ(memory, before) << what;
      ++refused;
      continue;
    }
    ASSERT_EQ(0, status) << what << ": " << mk_last_error();
    Bytes expected = before;
    std::copy_n(before.begin(), launch.arguments.m * row,
                expected.begin() + static_cast<std::ptrdiff_t>(bytes));
    EXPECT_EQ(memory, expected) << what;
  }
}

/// In a world of one rank, where a collective copies.
void expect_accepted_or_refused(const char* name, bool sums) {
  const auto cluster = cluster_of(1);
  mk_session* const session = attach(*cluster, 1, 0);
  std::uint32_t refused = 0, made = 0, refused_launches = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(testing::Message() << name << ", seed " << seed);
    Drawn draw(seed);
    const DrawnShape drawn = draw_shape(draw, sums);
    mk_op* op = nullptr;
    const mk_status status = mk_op_create(session, name, &drawn.shape, &op);
    if (!drawn.right) {
      expect_a_sentence(status, "shape");
      EXPECT_EQ(nullptr, op);
      ++refused;
      continue;
    }
    ASSERT_EQ(0, status) << mk_last_error();
    ++made;
    launch_some(draw, op, drawn.shape, refused_launches);
    mk_op_destroy(op);
    if (testing::Test::HasFailure()) break;
  }
  EXPECT_GT(refused, 50u);
  EXPECT_GT(made, 50u);
  EXPECT_GT(refused_launches, 300u);
  leave(session);
}

#define MK_TEST(id, name, Class)                      \
  TEST(DrawnArguments, Class##AcceptsOrRefusesThem) { \
    expect_accepted_or_refused(name, Class::kSums);   \
  }
MK_COLLECTIVES(MK_TEST)
#undef MK_TEST

}  // namespace
}  // namespace mk
