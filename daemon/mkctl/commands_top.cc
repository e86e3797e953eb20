// top: samples of all daemons come in on threads of their own; the terminal's thread draws them.
#include <sys/eventfd.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/terminal.h"
#include "daemon/mkctl/top_model.h"
#include "daemon/mkctl/top_screen.h"
#include "shm/files/standard_output.h"
#include "shm/host/unique_fd.h"

namespace mk::mkctl {
namespace {

constexpr auto kReconnect = std::chrono::seconds(1);

struct Options {
  Duration interval{"1s"};
  std::uint32_t count = 0;  ///< only with --json
};

std::vector<std::string> names_of(Fleet& fleet) {
  std::vector<std::string> names;
  for (const auto& daemon : fleet.daemons()) names.push_back(daemon->name());
  return names;
}

/// The model, kept up to date by one thread per daemon.
class Feed {
 public:
  Feed(Fleet& fleet, std::chrono::nanoseconds interval)
      : interval_(interval),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        model_(names_of(fleet)) {
    for (std::size_t i = 0; i < fleet.daemons().size(); ++i) {
      calls_.push_back(std::make_unique<Call>());
      threads_.emplace_back([this, i, daemon = fleet.daemons()[i].get()] { run(i, *daemon); });
    }
  }
  ~Feed() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      for (const auto& call : calls_) {
        if (call->context) call->context->TryCancel();
      }
      stopped_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  /// Readable when there is something new.
  int wake_fd() const { return wake_.get(); }
  void clear_wake() const {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
  }
  template <class Fn>
  auto with_model(Fn fn) {
    std::lock_guard lock(mutex_);
    return fn(model_);
  }

 private:
  struct Call {
    std::unique_ptr<grpc::ClientContext> context;
  };

  void run(std::size_t index, Daemon& daemon) {
    while (true) {
      grpc::ClientContext* context = nullptr;
      {
        std::lock_guard lock(mutex_);
        if (stopping_) return;
        calls_[index]->context = std::make_unique<grpc::ClientContext>();
        context = calls_[index]->context.get();
      }
      v1::WatchStatsRequest request;
      request.set_interval_ns(static_cast<std::uint64_t>(interval_.count()));
      const auto reader = daemon.stub().WatchStats(context, request);
      for (v1::StatsSample sample; reader->Read(&sample);) {
        std::lock_guard lock(mutex_);
        model_.add(index, sample);
        wake();
      }
      const grpc::Status done = reader->Finish();
      std::unique_lock lock(mutex_);
      if (stopping_) return;
      model_.lose(index, daemon.explain(done).error);
      wake();
      stopped_.wait_for(lock, kReconnect, [this] { return stopping_; });
    }
  }
  void wake() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
  }

  const std::chrono::nanoseconds interval_;
  const UniqueFd wake_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false;
  TopModel model_;
  std::vector<std::unique_ptr<Call>> calls_;
  std::vector<std::thread> threads_;
};

int draw(Fleet& fleet, const Options& options) {
  auto terminal = Terminal::open();
  if (!terminal) return fleet.print(error_answer(kExitUsage, terminal.error().message));
  Feed feed(fleet, options.interval.value());
  TopScreen screen;
  std::optional<TopModel> frozen;  // while paused
  for (bool running = true; running;) {
    if (!screen.paused()) {
      frozen.reset();
    } else if (!frozen) {
      frozen = feed.with_model([](const TopModel& model) { return model; });
    }
    const auto lines = [&](const TopModel& model) { return screen.lines(model, terminal->size()); };
    terminal->show(frozen ? lines(*frozen) : feed.with_model(lines));
    const Terminal::Event event = terminal->wait(feed.wake_fd(), std::chrono::milliseconds(1000));
    if (event.woken) feed.clear_wake();
    running = !event.ended;
    for (const int key : event.keys) running = screen.press(key) && running;
  }
  return kExitOk;
}

/// One line per interval.
int print_lines(Fleet& fleet, const Options& options) {
  Feed feed(fleet, options.interval.value());
  // The first samples have no rates yet.
  for (std::uint32_t line = 0; options.count == 0 || line < options.count; ++line) {
    std::this_thread::sleep_for(options.interval.value() * (line == 0 ? 2 : 1));
    const Json json = feed.with_model([](const TopModel& model) { return model.json(); });
    print_out("{}\n", text_of(fleet.envelope(json), -1));
    if (!flush_output()) return kExitUnhealthy;  // nobody reads on
    if (feed.with_model([](const TopModel& model) { return model.summary().answering; }) == 0) {
      return fleet.print(error_answer(kExitUnreachable, "no daemon answers"));
    }
  }
  return kExitOk;
}

}  // namespace

void declare_top_command(Commands& commands) {
  const auto options = std::make_shared<Options>();
  Command app = commands.add("top", "Links, queues and jobs, live", [options](Fleet& fleet) {
    return fleet.json() ? print_lines(fleet, *options) : draw(fleet, *options);
  });
  app.option("--interval", options->interval, "Time between samples, 100ms to 60s").with_default();
  app.option("--count", options->count, "With --json: stop after so many lines; 0: never")
      .with_default();
}

}  // namespace mk::mkctl
