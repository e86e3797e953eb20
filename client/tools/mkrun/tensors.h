/// \file
/// Tensors of files as operators take them: pieces, in an operator's element type.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "client/tools/mkrun/safetensors.h"
#include "client/tools/numeric/elements.h"

namespace mk::tools {

using Elements = std::vector<std::uint16_t>;

/// A tensor of an open file.
class Tensor {
 public:
  /// kNotFound lists what is there.
  static Result<Tensor> open(const std::string& path, const std::string& name);

  const std::string& dtype() const { return info_.dtype; }
  const std::vector<std::uint64_t>& shape() const { return info_.shape; }
  /// Elements of one index of the first dimension.
  std::uint64_t row_elements() const;

  /// Rows [row, row + rows) x columns [column, column + columns) of the tensor, taken as a matrix
  /// with a row for each index of the first dimension, row-major, rounded to `type`. Floats only. A
  /// NaN stays one; elements that are of `type` already keep their bits.
  Elements block(std::uint64_t row, std::uint64_t rows, std::uint64_t column, std::uint64_t columns,
                 DataType type) const;
  Elements rows(std::uint64_t row, std::uint64_t rows, DataType type) const {
    return block(row, rows, 0, row_elements(), type);
  }
  /// Finite elements that would become infinite in `type`: how many, and which is the first.
  struct Overflow {
    std::uint64_t count = 0;
    std::uint64_t first = 0;  ///< its index, row-major
    double value = 0;         ///< its value
  };
  Overflow overflow_in(DataType type) const;
  /// "[1, 7]": the indices of an element.
  std::string place_of(std::uint64_t element) const;

  /// Elements [first, first + count) of floats, row-major, as they are.
  std::vector<float> floats(std::uint64_t first, std::uint64_t count) const;
  /// Elements [first, first + count) of whole numbers, I32 or I64.
  std::vector<std::int64_t> integers(std::uint64_t first, std::uint64_t count) const;

 private:
  Tensor(SafetensorsFile file, TensorInfo info) : file_(std::move(file)), info_(std::move(info)) {}
  SafetensorsFile file_;
  TensorInfo info_;
};

/// By the operator's names for them.
using Tensors = std::map<std::string, Tensor>;

/// Turns a rows x columns matrix into columns x rows.
Elements turned(const Elements& matrix, std::uint64_t rows, std::uint64_t columns);
/// The largest magnitude of those that are finite.
double largest(const Elements& elements, DataType type);

}  // namespace mk::tools
