#include "shm/files/output_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <random>
#include <utility>

namespace mk {
namespace {

/// Descriptors below belong to a child's standard streams and reports.
constexpr int kFirstFd = 10;

/// No signal ends the process while this lives, SIGKILL apart.
class SignalsHeld {
 public:
  SignalsHeld() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsHeld() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;

 private:
  sigset_t before_;
};

std::string random_name() {
  std::random_device random;
  return fmt::format(".mkernel-{:08x}{:08x}.partial", random(), random());
}

/// A new file of that name in the folder, on the descriptor; the mode is the user's umask's.
UniqueFd open_named(int folder, const std::string& name) {
  return UniqueFd(
      ::openat(folder, name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
}

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISLNK(mode)) return "a symbolic link, and its target is not replaced";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "no regular file";
}

}  // namespace

template <class... Args>
tl::unexpected<Error> OutputFile::refuse(fmt::format_string<Args...> format, Args&&... args) const {
  return fail(ErrorCode::kInvalidArgument, "{} {} {}", rules_.option, path_,
              fmt::format(format, std::forward<Args>(args)...));
}

Result<OutputFile> OutputFile::create(const std::string& path, OutputRules rules) {
  OutputFile file(path, std::move(rules));
  MK_RETURN_IF_ERROR(file.open_folder());
  MK_ASSIGN_OR_RETURN(file.standing_, file.examine());
  MK_RETURN_IF_ERROR(file.open_draft());
  return file;
}

Status OutputFile::open_folder() {
  const auto slash = path_.rfind('/');
  const std::string folder = slash == path_.npos ? "." : slash == 0 ? "/" : path_.substr(0, slash);
  name_ = path_.substr(slash == path_.npos ? 0 : slash + 1);
  if (name_.empty() || name_ == "." || name_ == "..") return refuse("names no file");
  folder_.reset(::open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (folder_.valid()) return {};
  return fail_errno(errno, "{} {}: cannot open the folder {}", rules_.option, path_, folder);
}

/// What stands under the name, if anything, and that it may be replaced.
Result<std::optional<OutputFile::Standing>> OutputFile::examine() const {
  Standing standing;
  standing.held.reset(::openat(folder_.get(), name_.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  if (!standing.held.valid() && errno == ENOENT) return std::nullopt;
  if (!standing.held.valid() || ::fstat(standing.held.get(), &standing.info) != 0) {
    return fail_errno(errno, "{} {}: cannot look at it", rules_.option, path_);
  }
  MK_RETURN_IF_ERROR(check_replaceable(standing.info));
  return standing;
}

/// Whether that name is the standing file's.
bool OutputFile::is_standing(const std::string& name) const {
  struct stat info {};
  return ::fstatat(folder_.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
         same_file(info, standing_->info);
}

Status OutputFile::check_replaceable(const struct stat& info) const {
  if (!S_ISREG(info.st_mode)) {
    return refuse("is {}; name a new file", kind_of(info.st_mode));
  }
  for (const std::string& input : rules_.inputs) {
    struct stat other {};
    if (::stat(input.c_str(), &other) != 0) continue;
    if (same_file(other, info)) {
      return refuse("is the input {}; name another file", input);
    }
  }
  const bool writable = ::faccessat(folder_.get(), name_.c_str(), W_OK, AT_EACCESS) == 0;
  if (!writable) return refuse("exists and is write-protected; name another file");
  if (rules_.overwrite) return {};
  if (rules_.is_earlier_output) {
    const UniqueFd fd(
        ::openat(folder_.get(), name_.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    struct stat opened {};
    if (fd.valid() && ::fstat(fd.get(), &opened) == 0 && same_file(opened, info) &&
        rules_.is_earlier_output(fd.get())) {
      return {};
    }
  }
  return refuse(
      "exists and is not an earlier output of this command: name a new file, or give "
      "--overwrite");
}

Status OutputFile::open_draft() {
  UniqueFd draft;
  if (!rules_.without_tmpfile) {
    draft.reset(::openat(folder_.get(), ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0666));
  }
  // EISDIR is what kernels and file systems that do not know O_TMPFILE make of it.
  const bool unknown =
      rules_.without_tmpfile || (!draft.valid() && (errno == EOPNOTSUPP || errno == EISDIR ||
                                                    errno == EINVAL || errno == ENOENT));
  if (unknown) {
    const std::string name = random_name();
    const SignalsHeld held;
    draft = open_named(folder_.get(), name);
    if (draft.valid()) ::unlinkat(folder_.get(), name.c_str(), 0);
  }
  if (draft.valid()) draft_.reset(::fcntl(draft.get(), F_DUPFD_CLOEXEC, kFirstFd));
  if (!draft_.valid()) {
    return fail_errno(errno, "{} {}: cannot write in its folder", rules_.option, path_);
  }
  return {};
}

Status OutputFile::write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t wrote = ::write(draft_.get(), text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return fail_errno(errno, "{} {}: cannot write it", rules_.option, path_);
    text.remove_prefix(static_cast<std::size_t>(wrote));
  }
  return {};
}

Status OutputFile::publish() {
  const SignalsHeld held;
  if (standing_) ::fchmod(draft_.get(), standing_->info.st_mode & 0777);
  if (!standing_) {
    if (link_draft(name_)) return {};
    if (errno == EEXIST)
      return refuse("was created meanwhile; it is kept, and nothing was written");
  }
  MK_ASSIGN_OR_RETURN(const std::string named, name_draft());
  Status placed = standing_ ? replace(named) : place_new(named);
  if (!placed) ::unlinkat(folder_.get(), named.c_str(), 0);
  return placed;
}

/// Gives the draft itself a name that is free. Not possible for an unlinked file, or without /proc.
bool OutputFile::link_draft(const std::string& name) const {
  const std::string source = fmt::format("/proc/self/fd/{}", draft_.get());
  return ::linkat(AT_FDCWD, source.c_str(), folder_.get(), name.c_str(), AT_SYMLINK_FOLLOW) == 0;
}

/// The draft, or a copy of it, under a name of its own.
Result<std::string> OutputFile::name_draft() const {
  const std::string name = random_name();
  if (link_draft(name)) return name;
  const UniqueFd copy = open_named(folder_.get(), name);
  if (!copy.valid()) {
    return fail_errno(errno, "{} {}: cannot write in its folder", rules_.option, path_);
  }
  Status copied = copy_draft(copy.get());
  if (!copied) {
    ::unlinkat(folder_.get(), name.c_str(), 0);
    return propagate(copied);
  }
  return name;
}

Status OutputFile::copy_draft(int to) const {
  struct stat info {};
  if (::fstat(draft_.get(), &info) != 0) return fail_errno(errno, "cannot look at the draft");
  off_t at = 0;
  while (at < info.st_size) {
    const auto left = static_cast<std::size_t>(info.st_size - at);
    const ssize_t sent = ::sendfile(to, draft_.get(), &at, left);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return fail_errno(errno, "{} {}: cannot write it", rules_.option, path_);
  }
  if (standing_) ::fchmod(to, standing_->info.st_mode & 0777);
  return {};
}

/// Gives the draft that is called `named` the file's name, which nothing may have.
Status OutputFile::place_new(const std::string& named) const {
  const int folder = folder_.get();
  if (::renameat2(folder, named.c_str(), folder, name_.c_str(), RENAME_NOREPLACE) == 0) return {};
  // File systems without that flag have links, which replace nothing either.
  if (errno == EINVAL && ::linkat(folder, named.c_str(), folder, name_.c_str(), 0) == 0) {
    ::unlinkat(folder, named.c_str(), 0);
    return {};
  }
  if (errno == EEXIST) return refuse("was created meanwhile; it is kept, and nothing was written");
  return fail_errno(errno, "{} {}: cannot put it in place", rules_.option, path_);
}

/// Puts the draft that is called `named` in the place of the file that stood there at first.
Status OutputFile::replace(const std::string& named) const {
  const int folder = folder_.get();
  const auto exchange = [&] {
    return ::renameat2(folder, named.c_str(), folder, name_.c_str(), RENAME_EXCHANGE) == 0;
  };
  if (exchange()) {
    if (is_standing(named)) {
      ::unlinkat(folder, named.c_str(), 0);
      return {};
    }
    exchange();  // what came there goes back to its place, unchanged
    return refuse("was replaced meanwhile; it is kept, and nothing was written");
  }
  if (errno == ENOENT) return place_new(named);
  if (errno != EINVAL) {
    return fail_errno(errno, "{} {}: cannot put it in place", rules_.option, path_);
  }
  // A file system that cannot exchange.
  if (!is_standing(name_)) {
    return refuse("was replaced meanwhile; it is kept, and nothing was written");
  }
  if (::renameat(folder, named.c_str(), folder, name_.c_str()) == 0) return {};
  return fail_errno(errno, "{} {}: cannot put it in place", rules_.option, path_);
}

bool begins_with(int fd, std::string_view text) {
  char bytes[256];
  const ssize_t count = ::pread(fd, bytes, sizeof(bytes), 0);
  const auto dense = [](std::string from) {
    std::erase_if(from, [](unsigned char c) { return std::isspace(c) != 0; });
    return from;
  };
  const auto found = dense({bytes, static_cast<std::size_t>(std::max<ssize_t>(count, 0))});
  return found.starts_with(dense(std::string(text)));
}

}  // namespace mk
