#include "client/tools/mkrun/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

namespace mk::tools {
namespace {

/// The reference implementation's own limit for a header.
constexpr std::uint64_t kHeaderBytesMax = 100'000'000;
constexpr std::uint64_t kLengthBytes = 8;

/// In the header's metadata: who wrote the file, and so may replace it.
constexpr const char* kMadeBy = "made_by";
constexpr const char* kMkrun = "mkrun";
/// Of our own files, with one tensor.
constexpr std::uint64_t kOwnHeaderBytesMax = 1 << 16;

Status write_at(int fd, const std::string& path, std::uint64_t offset,
                std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t wrote = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return fail_errno(errno, "cannot write {}", path);
    bytes = bytes.subspan(static_cast<std::size_t>(wrote));
    offset += static_cast<std::uint64_t>(wrote);
  }
  return {};
}

/// A tensor's entry in the header, checked against the bytes of data the file has.
Result<TensorInfo> parse_tensor(const std::string& path, const std::string& name,
                                const nlohmann::json& entry, std::uint64_t data_bytes) {
  const auto wrong = [&](const char* what) {
    return fail(ErrorCode::kInvalidArgument, "{}: tensor '{}': {}", path, name, what);
  };
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
      !entry.contains("shape") || !entry["shape"].is_array() || !entry.contains("data_offsets") ||
      !entry["data_offsets"].is_array() || entry["data_offsets"].size() != 2) {
    return wrong("its header entry has no dtype, shape and data_offsets");
  }
  TensorInfo tensor;
  tensor.dtype = entry["dtype"].get<std::string>();
  for (const auto& side : entry["shape"]) {
    if (!side.is_number_unsigned()) return wrong("its shape is not a list of whole numbers");
    tensor.shape.push_back(side.get<std::uint64_t>());
  }
  if (!entry["data_offsets"][0].is_number_unsigned() ||
      !entry["data_offsets"][1].is_number_unsigned()) {
    return wrong("its data_offsets are not whole numbers");
  }
  tensor.begin = entry["data_offsets"][0].get<std::uint64_t>();
  tensor.end = entry["data_offsets"][1].get<std::uint64_t>();
  if (tensor.begin > tensor.end) return wrong("its data_offsets end before they begin");
  if (tensor.end > data_bytes) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: tensor '{}' ends at byte {} of the data, but the file has only {}: it is "
                "truncated, fetch it again",
                path, name, tensor.end, data_bytes);
  }
  if (const std::uint64_t element = dtype_bytes(tensor.dtype); element != 0) {
    std::uint64_t bytes = element;
    for (const std::uint64_t side : tensor.shape) {
      if (__builtin_mul_overflow(bytes, side, &bytes)) return wrong("its shape overflows");
    }
    if (bytes != tensor.end - tensor.begin) return wrong("its shape and its data_offsets disagree");
  }
  return tensor;
}

/// Whether a SafetensorsWriter wrote the file, which then has one tensor.
bool is_own_output(int fd) {
  std::uint64_t length = 0;
  if (::pread(fd, &length, kLengthBytes, 0) != static_cast<ssize_t>(kLengthBytes)) return false;
  if (length > kOwnHeaderBytesMax) return false;
  std::string text(length, '\0');
  if (::pread(fd, text.data(), length, kLengthBytes) != static_cast<ssize_t>(length)) return false;
  const auto header = nlohmann::json::parse(text, nullptr, false);
  if (!header.is_object() || header.size() != 2 || !header.contains("__metadata__")) return false;
  const auto& metadata = header["__metadata__"];
  return metadata.is_object() && metadata.value(kMadeBy, nlohmann::json()) == kMkrun;
}

}  // namespace

std::uint64_t dtype_bytes(const std::string& dtype) {
  if (dtype == "BF16" || dtype == "F16") return 2;
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "I64") return 8;
  return 0;
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return fail_errno(errno, "cannot open {}", path);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return fail_errno(errno, "cannot stat {}", path);
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (!S_ISREG(info.st_mode) || size < kLengthBytes) {
    return fail(ErrorCode::kInvalidArgument, "{} is not a safetensors file: it has {} bytes", path,
                size);
  }
  void* mapped = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (mapped == MAP_FAILED) return fail_errno(errno, "cannot map {}", path);
  SafetensorsFile file(static_cast<const std::byte*>(mapped), size);
  MK_RETURN_IF_ERROR(file.parse(path));
  return file;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : bytes_(std::exchange(other.bytes_, nullptr)),
      size_(other.size_),
      data_offset_(other.data_offset_),
      tensors_(std::move(other.tensors_)) {}

SafetensorsFile::~SafetensorsFile() {
  if (bytes_ != nullptr) ::munmap(const_cast<std::byte*>(bytes_), size_);
}

Status SafetensorsFile::parse(const std::string& path) {
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes_, sizeof(header_bytes));
  if (header_bytes > kHeaderBytesMax || header_bytes > size_ - kLengthBytes) {
    return fail(ErrorCode::kInvalidArgument,
                "{} announces a header of {} bytes but has {} in all: it is truncated or not a "
                "safetensors file",
                path, header_bytes, size_);
  }
  const char* text = reinterpret_cast<const char*>(bytes_) + kLengthBytes;
  const auto header = nlohmann::json::parse(text, text + header_bytes, nullptr, false);
  if (header.is_discarded() || !header.is_object()) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: its header is not a JSON object: not a safetensors file", path);
  }
  data_offset_ = kLengthBytes + header_bytes;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    MK_ASSIGN_OR_RETURN(auto tensor, parse_tensor(path, name, entry, size_ - data_offset_));
    tensors_.emplace(name, std::move(tensor));
  }
  return {};
}

Result<TensorInfo> SafetensorsFile::find(const std::string& name) const {
  if (const auto found = tensors_.find(name); found != tensors_.end()) return found->second;
  std::string names;
  std::size_t listed = 0;
  for (const auto& entry : tensors_) {
    if (++listed > 20) break;
    names += (names.empty() ? "" : ", ") + entry.first;
  }
  if (tensors_.size() > 20) names += fmt::format(" and {} more", tensors_.size() - 20);
  return fail(ErrorCode::kNotFound, "no tensor '{}'; there are: {}", name,
              names.empty() ? "none" : names);
}

Result<SafetensorsWriter> SafetensorsWriter::create(const std::string& path,
                                                    const std::string& name,
                                                    const TensorInfo& tensor, OutputRules rules) {
  rules.is_earlier_output = is_own_output;
  MK_ASSIGN_OR_RETURN(auto file, OutputFile::create(path, std::move(rules)));
  const std::uint64_t bytes = tensor.end - tensor.begin;
  std::string header =
      nlohmann::json{
          {"__metadata__", {{kMadeBy, kMkrun}}},
          {name, {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {0, bytes}}}}}
          .dump();
  header.resize((header.size() + 7) / 8 * 8,
                ' ');  // the format pads with spaces, so that the data is aligned
  const std::uint64_t length = header.size();
  MK_RETURN_IF_ERROR(write_at(file.fd(), path, 0, std::as_bytes(std::span(&length, 1))));
  MK_RETURN_IF_ERROR(write_at(file.fd(), path, kLengthBytes, std::as_bytes(std::span(header))));
  if (::ftruncate(file.fd(), static_cast<off_t>(kLengthBytes + length + bytes)) != 0)
    return fail_errno(errno, "cannot write {}", path);
  return SafetensorsWriter(std::move(file));
}

Result<SafetensorsPart> SafetensorsPart::open(UniqueFd fd, const std::string& path) {
  SafetensorsPart part(path, std::move(fd));
  std::uint64_t header_bytes = 0;
  struct stat info {};
  if (!part.fd_.valid() || ::fstat(part.fd_.get(), &info) != 0 ||
      ::pread(part.fd_.get(), &header_bytes, kLengthBytes, 0) !=
          static_cast<ssize_t>(kLengthBytes)) {
    return fail_errno(errno, "cannot write {}", path);
  }
  part.data_offset_ = kLengthBytes + header_bytes;
  part.data_bytes_ = static_cast<std::uint64_t>(info.st_size) - part.data_offset_;
  return part;
}

Status SafetensorsPart::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  if (offset > data_bytes_ || bytes.size() > data_bytes_ - offset) {
    return fail(ErrorCode::kInternal, "{}: bytes {} to {} of a tensor of {}", path_, offset,
                offset + bytes.size(), data_bytes_);
  }
  return write_at(fd_.get(), path_, data_offset_ + offset, bytes);
}

}  // namespace mk::tools
