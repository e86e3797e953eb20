#include "client/tools/mkrun/tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>

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
  for (std::uint64_t i = 0; i < rows; ++i) {
    for (std::uint64_t j = 0; j < columns; ++j) {
      block[i * columns + j] =
          from_float(type, element_at(info_.dtype, data, (row + i) * stride + column + j));
    }
  }
  return block;
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
  for (const std::uint16_t bits : elements)
    most = std::max(most, std::fabs(double{to_float(type, bits)}));
  return most;
}

}  // namespace mk::tools
