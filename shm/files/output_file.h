/// \file
/// A file that a program writes where its user said. It appears under its name whole, or not at
/// all.
#pragma once

#include <sys/stat.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shm/host/result.h"
#include "shm/host/unique_fd.h"

namespace mk {

/// What may be replaced. Never replaced are folders, devices, pipes, a symbolic link or its target,
/// a file that this process may not write, and an input.
struct OutputRules {
  std::string option;      ///< the user's word for the file, for messages: "--out"
  bool overwrite = false;  ///< any other file may be replaced: the user said so
  /// Whether a file, open for reading, is an earlier output of the same kind. Such a file may be
  /// replaced although the user did not say so. Empty: none is.
  std::function<bool(int fd)> is_earlier_output;
  std::vector<std::string> inputs;  ///< files that are read, by path; by inode they are compared
  bool without_tmpfile = false;     ///< for tests: as on file systems that have no O_TMPFILE
};

/// One thread. Nothing is left of it unless `publish` answered ok.
class OutputFile {
 public:
  /// Opens an empty draft in the file's folder. kInvalidArgument: the file must not be written;
  /// kSystem: it cannot. Each sentence names the option, the file and what to do.
  static Result<OutputFile> create(const std::string& path, OutputRules rules);
  OutputFile(OutputFile&&) noexcept = default;
  OutputFile& operator=(OutputFile&&) noexcept = default;

  /// The draft, for reading and writing; at least 10. Closed on exec.
  int fd() const { return draft_.get(); }
  const std::string& path() const { return path_; }
  /// Appends to the draft, from where the descriptor stands.
  Status write(std::string_view text);

  /// Gives the draft its name. An error leaves what stands there as it is. A file that came or
  /// changed since `create` is kept: kInvalidArgument.
  Status publish();

 private:
  /// What stands under the name, and is to be replaced.
  struct Standing {
    struct stat info {};
    UniqueFd held;  ///< open, so that no other file gets its inode number
  };

  OutputFile(std::string path, OutputRules rules)
      : path_(std::move(path)), rules_(std::move(rules)) {}
  Status open_folder();
  Status open_draft();
  Result<std::optional<Standing>> examine() const;
  bool is_standing(const std::string& name) const;
  Status check_replaceable(const struct stat& info) const;
  bool link_draft(const std::string& name) const;
  Result<std::string> name_draft() const;
  Status copy_draft(int to) const;
  Status place_new(const std::string& named) const;
  Status replace(const std::string& named) const;
  template <class... Args>
  tl::unexpected<Error> refuse(fmt::format_string<Args...> format, Args&&... args) const;

  std::string path_;
  OutputRules rules_;
  UniqueFd folder_;
  std::string name_;  ///< within the folder
  std::optional<Standing> standing_;
  UniqueFd draft_;
};

/// Whether the file begins with this text, white space apart: the mark of a program's own JSON.
bool begins_with(int fd, std::string_view text);

}  // namespace mk
