#include "tests/gpu/grouped_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "tests/gpu/products.h"

namespace mk::test {

using kernels::cuda::GroupedActivation;

std::string GroupedShape::text() const {
  constexpr const char* kActivations[] = {"none", "halves", "pairs"};
  std::string rows;
  for (std::size_t i = 0; i < counts.size() && i < 12; ++i)
    rows += fmt::format("{}{}", i == 0 ? "" : ",", counts[i]);
  return fmt::format("{} {} {} n {} k {}{}{} gap {} experts {} rows {}", name(dtype), name(layout),
                     kActivations[static_cast<int>(activation)], n, k, bias ? " bias" : "",
                     scale ? " scale" : "", gap, counts.size(), rows);
}

GroupedCase::GroupedCase(const GroupedShape& shape, std::uint64_t seed) : shape_(shape) {
  const auto experts = static_cast<std::int64_t>(shape.counts.size());
  const std::int64_t rows =
      std::accumulate(shape.counts.begin(), shape.counts.end(), std::int64_t{0}) +
      experts * shape.gap + shape.rows_spare;
  problem_.dtype = shape.dtype;
  problem_.b_layout = shape.layout;
  problem_.activation = shape.activation;
  problem_.experts = static_cast<int>(experts);
  problem_.rows_max = static_cast<int>(std::max<std::int64_t>(rows, 1));
  problem_.n = shape.n;
  problem_.k = shape.k;
  problem_.a = take(2 * std::int64_t{problem_.rows_max} * shape.k);
  problem_.b = take(2 * experts * shape.n * shape.k);
  problem_.c = take(2 * (problem_.rows_max + kGuardRows) * c_columns());
  problem_.offsets = static_cast<const std::uint32_t*>(take(4 * (experts + 1)));
  if (shape.gap != 0) problem_.counts = static_cast<const std::uint32_t*>(take(4 * experts));
  if (shape.bias) problem_.bias = take(2 * experts * shape.n);
  if (shape.scale) problem_.row_scale = static_cast<const float*>(take(4 * problem_.rows_max));
  set_counts(shape.counts, nullptr);
  fill(seed, nullptr);
}

void* GroupedCase::take(std::int64_t bytes) {
  memory_.emplace_back(static_cast<std::size_t>(bytes));
  return memory_.back().data();
}

std::int64_t GroupedCase::c_columns() const {
  return shape_.activation == GroupedActivation::kNone ? shape_.n : shape_.n / 2;
}

void GroupedCase::fill(std::uint64_t seed, cudaStream_t stream) const {
  const auto normal = [&](const void* to, std::int64_t count) {
    fill_normal(const_cast<void*>(to), shape_.dtype, count, seed++, stream);
  };
  normal(problem_.a, std::int64_t{problem_.rows_max} * shape_.k);
  normal(problem_.b, std::int64_t{problem_.experts} * shape_.n * shape_.k);
  if (problem_.bias != nullptr) normal(problem_.bias, std::int64_t{problem_.experts} * shape_.n);
  if (problem_.row_scale != nullptr)
    fill_scales(const_cast<float*>(problem_.row_scale), problem_.rows_max, seed++, stream);
  poison_output(stream);
}

void GroupedCase::poison_output(cudaStream_t stream) const {
  poison(problem_.c, (problem_.rows_max + kGuardRows) * c_columns(), stream);
}

void GroupedCase::set_counts(const std::vector<std::uint32_t>& counts, cudaStream_t stream) {
  shape_.counts = counts;
  offsets_.clear();
  std::uint32_t row = 0;
  for (const std::uint32_t count : counts) {
    row += static_cast<std::uint32_t>(shape_.gap);
    offsets_.push_back(row);
    row += count;
  }
  offsets_.push_back(row);
  const auto copy = [&](const std::uint32_t* to, const std::vector<std::uint32_t>& from) {
    require(cudaMemcpyAsync(const_cast<std::uint32_t*>(to), from.data(), 4 * from.size(),
                            cudaMemcpyHostToDevice, stream),
            "counts");
  };
  copy(problem_.offsets, offsets_);
  if (problem_.counts != nullptr) copy(problem_.counts, counts);
  require(cudaStreamSynchronize(stream), "counts");
}

GroupedVerdict GroupedCase::judge(cudaStream_t stream) const {
  return judge_grouped(problem_, problem_.rows_max + kGuardRows, stream);
}

std::vector<std::uint16_t> GroupedCase::output(cudaStream_t stream) const {
  std::vector<std::uint16_t> elements(
      static_cast<std::size_t>((problem_.rows_max + kGuardRows) * c_columns()));
  require(cudaMemcpyAsync(elements.data(), problem_.c, 2 * elements.size(), cudaMemcpyDeviceToHost,
                          stream),
          "output");
  require(cudaStreamSynchronize(stream), "output");
  return elements;
}

std::uint16_t* GroupedCase::element_of_a(std::int64_t row, std::int64_t column) const {
  return static_cast<std::uint16_t*>(const_cast<void*>(problem_.a)) + row * shape_.k + column;
}

}  // namespace mk::test
