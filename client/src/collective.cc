#include "mkernel/collective.h"

#include <cstdint>

#include "client/src/collective_operator.h"

namespace mk {

Status check_collective(std::string_view op, const void* input, const void* output,
                        const CollectiveRows& rows, std::uint64_t row_bytes) {
  const auto missing = [&](const char* name, std::uint64_t count) {
    return fail(ErrorCode::kInvalidArgument, "{}: the {} is null, but this rank has {} rows of it",
                op, name, count);
  };
  if (input == nullptr && rows.input != 0) return missing("input", rows.input);
  if (output == nullptr && rows.output != 0) return missing("output", rows.output);
  const auto in = reinterpret_cast<std::uintptr_t>(input);
  const auto out = reinterpret_cast<std::uintptr_t>(output);
  const std::uint64_t in_bytes = rows.input * row_bytes;
  const std::uint64_t out_bytes = rows.output * row_bytes;
  if (in_bytes == 0 || out_bytes == 0 || in + in_bytes <= out || out + out_bytes <= in) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: the output ({} bytes from {:#x} on) shares memory with the input ({} bytes from "
              "{:#x} on); give it memory of its own",
              op, out_bytes, out, in_bytes, in);
}

Result<CollectiveShape> checked_collective(std::string_view op, std::uint64_t m_max,
                                           std::uint64_t n, DataType dtype) {
  MK_RETURN_IF_ERROR(check_dimension(op, "m_max", m_max));
  MK_RETURN_IF_ERROR(check_dimension(op, "n", n));
  MK_ASSIGN_OR_RETURN(const kernels::DType checked, checked_any_dtype(op, dtype));
  return CollectiveShape{static_cast<std::uint32_t>(m_max), static_cast<std::uint32_t>(n), checked};
}

Collective::Collective(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Collective::Collective(Collective&&) noexcept = default;
Collective& Collective::operator=(Collective&&) noexcept = default;
Collective::~Collective() = default;

Result<LaunchStats> Collective::launch(const void* input, void* output, std::uint64_t m,
                                       LaunchOptions options) {
  return impl_->launch(input, output, m, options);
}
Status Collective::launch_on(CudaStream stream, const void* input, void* output, std::uint64_t m,
                             LaunchOptions options) {
  return impl_->launch_on(stream, input, output, m, options);
}
Status Collective::status() const { return impl_->status(); }
Result<LaunchStats> Collective::finish(CudaStream stream) { return impl_->finish(stream); }
void Collective::set_trace(bool on) { impl_->set_trace(on); }
std::vector<TraceSpan> Collective::trace() const { return impl_->trace(); }

}  // namespace mk
