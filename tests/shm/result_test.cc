// Errors and the macros that pass them on; cutting text.
#include "shm/host/result.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <set>
#include <string>

#include "shm/host/text.h"
#include "shm/limits.h"

namespace mk {
namespace {

Result<std::unique_ptr<int>> half(int value) {
  if (value % 2 != 0) return fail(ErrorCode::kInvalidArgument, "{} is odd", value);
  return std::make_unique<int>(value / 2);
}

Result<int> quarter(int value) {
  MK_ASSIGN_OR_RETURN(const auto once, half(value));
  MK_ASSIGN_OR_RETURN(auto twice, half(*once));
  return *twice;
}

Status check_quarter(int value) {
  MK_RETURN_IF_ERROR(quarter(value));
  return {};
}

TEST(Result, MacrosPassValuesAndErrorsOn) {
  EXPECT_EQ(quarter(12), 3);
  EXPECT_EQ(quarter(6).error(), (Error{ErrorCode::kInvalidArgument, "3 is odd"}));
  EXPECT_TRUE(check_quarter(8));
  EXPECT_EQ(check_quarter(7).error().message, "7 is odd");
}

TEST(Result, ErrnoIsNamed) {
  EXPECT_EQ(errno_text(ENOENT), "No such file or directory (ENOENT)");
  EXPECT_NE(errno_text(123456).find("123456"), std::string::npos);
  const Status status = fail_errno(EACCES, "cannot open {}", 7);
  EXPECT_EQ(status.error(),
            (Error{ErrorCode::kSystem, "cannot open 7: Permission denied (EACCES)"}));
}

TEST(Result, EveryCodeHasItsOwnName) {
  std::set<std::string> names;
  for (std::uint32_t code = 0; code <= 19; ++code)
    names.insert(error_code_name(static_cast<ErrorCode>(code)));
  EXPECT_EQ(names.size(), 20u);
  EXPECT_EQ(names.count("unknown"), 0u);
  EXPECT_STREQ(error_code_name(static_cast<ErrorCode>(20)), "unknown");
}

TEST(ClipUtf8, ShortTextStaysWhole) {
  EXPECT_EQ(shm::clip_utf8("abc", 3), "abc");
  EXPECT_EQ(shm::clip_utf8("", 0), "");
  EXPECT_EQ(shm::clip_utf8("abc", 2), "ab");
  EXPECT_EQ(shm::clip_utf8("abc", 0), "");
}

TEST(ClipUtf8, NeverCutsACharacter) {
  const std::string text = "a\u00e9\u20ac\U0001F600z";  // of 1, 2, 3, 4 and 1 bytes
  ASSERT_EQ(text.size(), 11u);
  const std::size_t whole[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 11, 11};
  for (std::size_t max = 0; max < 13; ++max)
    EXPECT_EQ(shm::clip_utf8(text, max), text.substr(0, whole[max])) << max;
}

TEST(ClipUtf8, CutsWhatIsNoUtf8WhereItIs) {
  EXPECT_EQ(shm::clip_utf8(std::string(20, '\x80'), 10), std::string(10, '\x80'));
}

TEST(JobName, IsPrintableAsciiWithoutSpaces) {
  for (const std::string& name :
       {std::string("a"), std::string("train-7/b:~!"), std::string(shm::kJobNameBytesMax, 'x')})
    EXPECT_TRUE(shm::is_job_name(name)) << name;
  for (const std::string& name :
       {std::string(), std::string(shm::kJobNameBytesMax + 1, 'x'), std::string("a b"),
        std::string("a\n"), std::string("\x7f"), std::string("caf\xc3\xa9"), std::string(1, '\0')})
    EXPECT_FALSE(shm::is_job_name(name)) << name;
}

TEST(PlainText, IsUtf8WithoutControlCharacters) {
  for (const char* text : {"", "a b~", "caf\u00e9", "\u20ac\U0001F600", "\u00a0", "\U0010ffff"})
    EXPECT_TRUE(shm::is_plain_text(text)) << text;
  for (const std::string text :
       {"caf\xe9", "\x80", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80",
        "\xf8\x88\x80\x80", "\xe2\x82", "a\n", "\x1b[2J", "\x7f", "\u0085"})
    EXPECT_FALSE(shm::is_plain_text(text)) << shm::plain_text(text, 100);
  EXPECT_FALSE(shm::is_plain_text(std::string(1, '\0')));
}

TEST(PlainText, WritesOtherBytesOut) {
  EXPECT_EQ(shm::plain_text("caf\xe9 caf\u00e9\n", 100), "caf\\xe9 caf\u00e9\\x0a");
  EXPECT_EQ(shm::plain_text("caf\xe9!", 5), "caf\\x") << "cut to the length";
  EXPECT_EQ(shm::plain_text("a\u20acb", 3), "a") << "no half character";
  for (int byte = 0; byte < 256; ++byte)
    EXPECT_TRUE(shm::is_plain_text(shm::plain_text(std::string(3, static_cast<char>(byte)), 100)));
}

}  // namespace
}  // namespace mk
