#include "client/tools/mkrun/tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "client/tools/numeric/outcome.h"

namespace mk::tools {
namespace {

/// Element `index` of data that may lie unaligned in its file.
template <class T>
T value_at(std::span<const std::byte> data, std::uint64_t index) {
  T value{};
  std::memcpy(&value, data.data() + index * sizeof(T), sizeof(T));
  return value;
}

float element_at(const std::string& dtype, std::span<const std::byte> data, std::uint64_t index) {
  if (dtype == "F32") return value_at<float>(data, index);
  const auto bits = value_at<std::uint16_t>(data, index);
  return dtype == "BF16" ? bf16_to_float(bits) : f16_to_float(bits);
}

}  // namespace

Result<Tensor> Tensor::open(const std::string& path, const std::string& name) {
  MK_ASSIGN_OR_RETURN(auto file, SafetensorsFile::open(path));
  MK_ASSIGN_OR_RETURN(auto info, file.find(name));
  return Tensor(std::move(file), std::move(info));
}

std::uint64_t Tensor::row_elements() const {
  std::uint64_t elements = 1;
  for (std::size_t i = 1; i < info_.shape.size(); ++i) elements *= info_.shape[i];
  return elements;
}

Elements Tensor::block(std::uint64_t row, std::uint64_t rows, std::uint64_t column,
                       std::uint64_t columns, DataType type) const {
  const auto data = file_.data(info_);
  const std::uint64_t stride = row_elements();
  Elements block(rows * columns);
  if (info_.dtype == (type == DataType::kBf16 ? "BF16" : "F16")) {
    for (std::uint64_t i = 0; i < rows; ++i) {
      std::memcpy(block.data() + i * columns, data.data() + ((row + i) * stride + column) * 2,
                  columns * 2);
    }
    return block;
  }
  for (std::uint64_t i = 0; i < rows; ++i) {
    for (std::uint64_t j = 0; j < columns; ++j) {
      block[i * columns + j] =
          from_float(type, element_at(info_.dtype, data, (row + i) * stride + column + j));
    }
  }
  return block;
}

Tensor::Overflow Tensor::overflow_in(DataType type) const {
  Overflow overflow;
  const auto data = file_.data(info_);
  const double threshold = overflow_threshold(type);
  const auto look = [&](std::uint64_t count, auto value_of) {
    for (std::uint64_t i = 0; i < count; ++i) {
      const double value = value_of(i);
      if (!std::isfinite(value) || std::fabs(value) < threshold) continue;
      if (overflow.count++ != 0) continue;
      overflow.first = i;
      overflow.value = value;
    }
  };
  if (info_.dtype == "F32") {
    look(data.size() / 4, [&](std::uint64_t i) { return double{value_at<float>(data, i)}; });
  } else if (info_.dtype == "BF16" && type == DataType::kF16) {
    look(data.size() / 2,
         [&](std::uint64_t i) { return double{bf16_to_float(value_at<std::uint16_t>(data, i))}; });
  }
  return overflow;
}

std::string Tensor::place_of(std::uint64_t element) const {
  std::vector<std::uint64_t> indices(info_.shape.size());
  for (std::size_t i = indices.size(); i-- > 0;) {
    indices[i] = element % info_.shape[i];
    element /= info_.shape[i];
  }
  return fmt::format("[{}]", fmt::join(indices, ", "));
}

std::vector<float> Tensor::floats(std::uint64_t first, std::uint64_t count) const {
  const auto data = file_.data(info_);
  std::vector<float> all(count);
  for (std::uint64_t i = 0; i < count; ++i) all[i] = element_at(info_.dtype, data, first + i);
  return all;
}

std::vector<std::int64_t> Tensor::integers(std::uint64_t first, std::uint64_t count) const {
  const auto data = file_.data(info_);
  std::vector<std::int64_t> all(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    all[i] = info_.dtype == "I64" ? value_at<std::int64_t>(data, first + i)
                                  : value_at<std::int32_t>(data, first + i);
  }
  return all;
}

Elements turned(const Elements& matrix, std::uint64_t rows, std::uint64_t columns) {
  Elements all(matrix.size());
  for (std::uint64_t i = 0; i < rows; ++i) {
    for (std::uint64_t j = 0; j < columns; ++j) all[j * rows + i] = matrix[i * columns + j];
  }
  return all;
}

double largest(const Elements& elements, DataType type) {
  double most = 0;
  for (const std::uint16_t bits : elements) {
    const double magnitude = std::fabs(double{to_float(type, bits)});
    if (std::isfinite(magnitude)) most = std::max(most, magnitude);
  }
  return most;
}

}  // namespace mk::tools
