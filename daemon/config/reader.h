/// \file
/// Reads a TOML table key by key, collecting every mistake with its place instead of stopping at
/// the first. Private to daemon/config: it brings all of toml++ with it.
#pragma once

#define TOML_EXCEPTIONS 0
#define TOML_ENABLE_FORMATTERS 0
// The library asserts things about its input that its own next lines check, e.g. for "[.a]"; and in
// a build with NDEBUG lets the compiler assume them. A text must do neither to a daemon.
#define TOML_ASSERT(expr) static_cast<void>(0)
#pragma push_macro("NDEBUG")
#undef NDEBUG
#include <toml++/toml.h>
#pragma pop_macro("NDEBUG")

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shm/host/result.h"

namespace mk::daemon {

/// The mistakes of one load, in the order of their places; those without a place come last.
class Diagnostics {
 public:
  explicit Diagnostics(std::string file) : file_(std::move(file)) {}

  void at(const toml::source_region& where, std::string text) {
    const auto line = static_cast<std::uint64_t>(where.begin.line);
    const auto column = static_cast<std::uint64_t>(where.begin.column);
    entries_.push_back(
        {line << 32 | column, fmt::format("{}:{}:{}: {}", file_, line, column, text)});
  }
  /// Of a flag or of the whole; `text` stands alone.
  void plain(std::string text) { entries_.push_back({UINT64_MAX, std::move(text)}); }

  bool empty() const { return entries_.empty(); }
  std::string text() {
    std::stable_sort(entries_.begin(), entries_.end(),
                     [](const Entry& a, const Entry& b) { return a.place < b.place; });
    std::string all;
    for (const Entry& entry : entries_) all += (all.empty() ? "" : "\n") + entry.text;
    return all;
  }

 private:
  struct Entry {
    std::uint64_t place;
    std::string text;
  };
  std::string file_;
  std::vector<Entry> entries_;
};

inline bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

/// ASCII without control characters.
inline bool is_line(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

/// Refuses the first byte of `text` that is not ASCII. toml++ (3.1 to 3.4) reaches undefined
/// behaviour where it skips white space and meets a character such as U+00E9. So no such text may
/// come to it. No value of ours needs one.
inline void refuse_beyond_ascii(std::string_view text, Diagnostics& diagnostics) {
  toml::source_position place{1, 1};
  for (const char c : text) {
    if (static_cast<unsigned char>(c) >= 0x80) {
      diagnostics.at({place, place, nullptr},
                     fmt::format("byte 0x{:02x} is not ASCII: a configuration is ASCII throughout, "
                                 "its comments too",
                                 static_cast<unsigned>(static_cast<unsigned char>(c))));
      return;
    }
    ++place.column;
    if (c == '\n') place = {place.line + 1, 1};
  }
}

/// One table. Every key that may occur is asked for once; `finish` refuses the others.
class Section {
 public:
  Section(const toml::table* table, std::string prefix, Diagnostics& diagnostics)
      : table_(table), prefix_(std::move(prefix)), diagnostics_(diagnostics) {}

  template <class T>
  void integer(std::string_view key, std::int64_t min, std::int64_t max, T& into) {
    const toml::node* node = find(key);
    if (!node) return;
    const auto* value = node->as_integer();
    if (!value || value->get() < min || value->get() > max) {
      return refuse(*node, key, fmt::format("a whole number from {} to {} is expected", min, max));
    }
    into = static_cast<T>(value->get());
  }

  /// The same, or `word`, which stands for `meaning`.
  template <class T>
  void integer_or(std::string_view key, std::int64_t min, std::int64_t max, std::string_view word,
                  T meaning, T& into) {
    const toml::node* node = find(key);
    if (!node) return;
    const auto* text = node->as_string();
    const auto* value = node->as_integer();
    if (text && text->get() == word) {
      into = meaning;
    } else if (value && value->get() >= min && value->get() <= max) {
      into = static_cast<T>(value->get());
    } else {
      refuse(*node, key,
             fmt::format("a whole number from {} to {}, or \"{}\", is expected", min, max, word));
    }
  }

  void boolean(std::string_view key, bool& into) {
    const toml::node* node = find(key);
    if (!node) return;
    const auto* value = node->as_boolean();
    if (!value) return refuse(*node, key, "true or false is expected");
    into = value->get();
  }

  /// A string of ASCII that `accept` (string_view -> Status) takes.
  template <class Accept>
  void string(std::string_view key, Accept&& accept) {
    const toml::node* node = find(key);
    if (!node) return;
    const auto* value = node->as_string();
    if (!value) return refuse(*node, key, "a string in quotes is expected");
    if (!is_ascii(value->get())) return refuse(*node, key, "characters of ASCII are expected");
    const Status status = accept(std::string_view(value->get()));
    if (!status) refuse(*node, key, status.error().message);
  }

  void integers(std::string_view key, std::int64_t min, std::int64_t max,
                std::vector<std::int64_t>& into) {
    list<std::int64_t>(key,
                       fmt::format("a list of whole numbers from {} to {} is expected", min, max),
                       into, [&](std::int64_t value) { return value >= min && value <= max; });
  }

  /// A list of strings of `bytes_min` to `bytes_max` characters of ASCII, each of one line.
  void strings(std::string_view key, std::size_t bytes_min, std::size_t bytes_max,
               std::vector<std::string>& into) {
    list<std::string>(key,
                      fmt::format("a list of strings of {} to {} bytes of ASCII is expected",
                                  bytes_min, bytes_max),
                      into, [&](const std::string& value) {
                        return is_line(value) && value.size() >= bytes_min &&
                               value.size() <= bytes_max;
                      });
  }

  /// The same, or one string alone for a list of it; "": no entry.
  void string_or_strings(std::string_view key, std::size_t bytes_max,
                         std::vector<std::string>& into) {
    const toml::node* node = table_ ? table_->get(key) : nullptr;
    const auto* value = node ? node->as_string() : nullptr;
    if (!value) return strings(key, 1, bytes_max, into);
    known_.emplace_back(key);
    if (!is_line(value->get()) || value->get().size() > bytes_max) {
      return refuse(*node, key,
                    fmt::format("a line of at most {} bytes of ASCII is expected, or "
                                "a list of them",
                                bytes_max));
    }
    into.clear();
    if (!value->get().empty()) into.push_back(value->get());
  }

  /// A table within; empty when absent.
  Section section(std::string_view key) {
    const toml::node* node = find(key);
    const toml::table* table = node ? node->as_table() : nullptr;
    if (node && !table) refuse(*node, key, fmt::format("a table is expected: [{}]", path(key)));
    return Section(table, path(key), diagnostics_);
  }

  /// `read(Section&)` for each table of [[key]].
  template <class Read>
  void each(std::string_view key, Read&& read) {
    const toml::node* node = find(key);
    if (!node) return;
    const toml::array* array = node->as_array();
    if (!array || !std::all_of(array->begin(), array->end(),
                               [](const toml::node& element) { return element.is_table(); })) {
      return refuse(*node, key, fmt::format("a list of tables is expected: [[{}]]", path(key)));
    }
    for (const toml::node& element : *array) {
      Section one(element.as_table(), path(key), diagnostics_);
      read(one);
    }
  }

  /// Whether the key is there; a mistake at the table's place if not.
  void require(std::string_view key) {
    if (table_ && !table_->contains(key)) {
      diagnostics_.at(table_->source(), fmt::format("{} is missing", path(key)));
    }
  }

  /// A mistake about the whole table.
  void refuse_table(std::string_view text) {
    if (table_) diagnostics_.at(table_->source(), fmt::format("{}: {}", prefix_, text));
  }

  /// Refuses keys that nobody asked for.
  void finish();

 private:
  /// A list whose elements are all of type T and good.
  template <class T, class Good>
  void list(std::string_view key, const std::string& expected, std::vector<T>& into, Good&& good) {
    const toml::node* node = find(key);
    if (!node) return;
    std::vector<T> values;
    bool all = node->is_array();
    if (all) {
      for (const toml::node& element : *node->as_array()) {
        const auto* value = element.as<T>();
        all = all && value && good(value->get());
        if (all) values.push_back(value->get());
      }
    }
    if (!all) return refuse(*node, key, expected);
    into = std::move(values);
  }

  const toml::node* find(std::string_view key) {
    known_.emplace_back(key);
    return table_ ? table_->get(key) : nullptr;
  }
  void refuse(const toml::node& node, std::string_view key, std::string_view text) {
    diagnostics_.at(node.source(), fmt::format("{}: {}", path(key), text));
  }
  std::string path(std::string_view key) const {
    return prefix_.empty() ? std::string(key) : fmt::format("{}.{}", prefix_, key);
  }

  const toml::table* table_;
  std::string prefix_;
  Diagnostics& diagnostics_;
  std::vector<std::string> known_;
};

/// The known key that `key` was probably meant to be; empty when none is near.
std::string nearest_key(std::string_view key, const std::vector<std::string>& known);

}  // namespace mk::daemon
