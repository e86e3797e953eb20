/// \file
/// The safetensors file format (https://github.com/huggingface/safetensors, "Format"): 8 bytes of
/// header length, a JSON header with each tensor's dtype, shape and byte range, then the data.
/// Everything read from a file is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "shm/host/result.h"

namespace mk::tools {

struct TensorInfo {
  std::string dtype;  ///< as in the file: "BF16", "F16", "F32", ...
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0, end = 0;  ///< bytes from the start of the data
};

/// A mapped file. Movable; unmaps itself.
class SafetensorsFile {
 public:
  /// Errors name the file and what is wrong with it (missing, truncated, not safetensors, ranges
  /// that do not fit).
  static Result<SafetensorsFile> open(const std::string& path);
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;
  ~SafetensorsFile();

  /// kNotFound lists the names that are there.
  Result<TensorInfo> find(const std::string& name) const;
  std::span<const std::byte> data(const TensorInfo& tensor) const {
    return {bytes_ + data_offset_ + tensor.begin, tensor.end - tensor.begin};
  }
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }

 private:
  SafetensorsFile(const std::byte* bytes, std::uint64_t size) : bytes_(bytes), size_(size) {}
  Status parse(const std::string& path);

  const std::byte* bytes_;
  std::uint64_t size_;
  std::uint64_t data_offset_ = 0;
  std::map<std::string, TensorInfo> tensors_;
};

/// Writes a file with one tensor, piece by piece; as PATH.partial; `publish` puts it in place.
class SafetensorsWriter {
 public:
  static Result<SafetensorsWriter> create(const std::string& path, const std::string& name,
                                          const TensorInfo& tensor);
  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;
  /// Removes the file unless it is finished.
  ~SafetensorsWriter();

  /// The next bytes of the data.
  Status append(std::span<const std::byte> bytes);
  /// All bytes are there: the file stays, still as PATH.partial.
  Status finish();
  /// Renames a finished file to `path`.
  static Status publish(const std::string& path);
  /// Removes PATH.partial, if it is there.
  static void discard(const std::string& path);

 private:
  SafetensorsWriter(std::string path, int fd, std::uint64_t left);
  Status write_all(std::span<const std::byte> bytes);

  std::string path_;
  int fd_;
  std::uint64_t left_;
};

/// Bytes of one element of a safetensors dtype; 0 for one we do not know.
std::uint64_t dtype_bytes(const std::string& dtype);

}  // namespace mk::tools
