/// \file
/// The screen of `mkctl top` as lines of text, and what keys change of it. No terminal here.
#pragma once

#include <string>
#include <vector>

#include "daemon/mkctl/top_model.h"

namespace mk::mkctl {

struct ScreenSize {
  int rows = 24, columns = 80;
};

/// A key: a character, or one of these.
enum Key : int { kKeyUp = 0x100, kKeyDown, kKeyPageUp, kKeyPageDown, kKeyEscape };
inline constexpr int kKeyEnter = '\r';
inline constexpr int kKeyBackspace = 0x7f;

class TopScreen {
 public:
  /// What a key does; false: it ends the program.
  bool press(int key);
  /// At most `size.rows` lines, none wider than `size.columns`.
  std::vector<std::string> lines(const TopModel& model, ScreenSize size);
  /// While it is, `lines` should be given the same model.
  bool paused() const { return paused_; }

 private:
  std::vector<TopRow> chosen(const TopModel& model) const;
  std::string table_header(const std::vector<std::size_t>& widths) const;

  TopView view_ = TopView::kLinks;
  std::size_t sort_[kTopViews] = {first_sort_of(TopView::kLinks), first_sort_of(TopView::kQueues),
                                  first_sort_of(TopView::kJobs)};
  bool ascending_ = false, paused_ = false, help_ = false, typing_ = false;
  std::string filter_;
  int scroll_ = 0, page_ = 1;
};

/// `width` characters, the newest value at the right, scaled to the greatest of those shown.
std::string sparkline(const History& history, int width);
/// `text` cut or padded to `width` characters of UTF-8.
std::string fit(const std::string& text, int width, bool right = false);

}  // namespace mk::mkctl
