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
#include <utility>
#include <vector>

#include "shm/files/output_file.h"
#include "shm/host/result.h"
#include "shm/host/unique_fd.h"

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

/// A file with one tensor, which several processes fill piece by piece. It appears under its name
/// when it is published, or not at all.
class SafetensorsWriter {
 public:
  /// The whole file, all elements 0. `rules` say what may be replaced; earlier files of this class
  /// may.
  static Result<SafetensorsWriter> create(const std::string& path, const std::string& name,
                                          const TensorInfo& tensor, OutputRules rules);

  /// For processes that fill it: see SafetensorsPart.
  int fd() const { return file_.fd(); }
  Status publish() { return file_.publish(); }

 private:
  explicit SafetensorsWriter(OutputFile file) : file_(std::move(file)) {}
  OutputFile file_;
};

/// A process that fills a part of such a file.
class SafetensorsPart {
 public:
  /// `fd`: the writer's, in this process (inherited or duplicated); `path`, for messages.
  static Result<SafetensorsPart> open(UniqueFd fd, const std::string& path);

  /// Bytes of the tensor's data from `offset` on. kInternal: beyond its end.
  Status write(std::uint64_t offset, std::span<const std::byte> bytes);

 private:
  SafetensorsPart(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  std::string path_;
  UniqueFd fd_;
  std::uint64_t data_offset_ = 0;
  std::uint64_t data_bytes_ = 0;
};

/// Bytes of one element of a safetensors dtype; 0 for one we do not know.
std::uint64_t dtype_bytes(const std::string& dtype);

}  // namespace mk::tools
