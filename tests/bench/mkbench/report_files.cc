#include "tests/bench/mkbench/report_files.h"

#include <string_view>
#include <utility>

namespace mk::bench {
namespace {

// How our own files begin.
constexpr std::string_view kJsonMark = R"({"tool":"mkbench)";
constexpr std::string_view kPictureMark = "<!-- mkbench -->";

Status open_one(const char* option, const std::string& path, bool overwrite, std::string_view mark,
                std::optional<OutputFile>& file) {
  if (path.empty()) return {};
  OutputRules rules;
  rules.option = option;
  rules.overwrite = overwrite;
  rules.is_earlier_output = [mark](int fd) { return begins_with(fd, mark); };
  MK_ASSIGN_OR_RETURN(auto opened, OutputFile::create(path, std::move(rules)));
  file.emplace(std::move(opened));
  return {};
}

Status write(std::optional<OutputFile>& file, const std::string& text) {
  if (!file) return {};
  MK_RETURN_IF_ERROR(file->write(text));
  return file->publish();
}

/// As text, the tool that made it in front.
std::string text_of(nlohmann::json object, const std::string& tool, int indent) {
  object.erase("tool");
  return fmt::format("{{{}\"tool\": {},{}\n", indent < 0 ? "" : "\n ", nlohmann::json(tool).dump(),
                     object.dump(indent).substr(1));
}

}  // namespace

Result<ReportFiles> ReportFiles::open(const RunFlags& flags) {
  ReportFiles files;
  const bool any = flags.overwrite;
  MK_RETURN_IF_ERROR(open_one("--json", flags.json_path, any, kJsonMark, files.json_));
  MK_RETURN_IF_ERROR(open_one("--trace", flags.trace_path, any, kJsonMark, files.trace_));
  MK_RETURN_IF_ERROR(
      open_one("--trace-picture", flags.picture_path, any, kPictureMark, files.picture_));
  return files;
}

Status ReportFiles::write_json(nlohmann::json report) {
  const std::string tool = report.value("tool", "mkbench");
  return write(json_, text_of(std::move(report), tool, 1));
}
Status ReportFiles::write_trace(nlohmann::json trace) {
  return write(trace_, text_of(std::move(trace), "mkbench trace", -1));
}
Status ReportFiles::write_picture(const std::string& picture) {
  return write(picture_, "<!-- mkbench -->\n" + picture);
}

}  // namespace mk::bench
