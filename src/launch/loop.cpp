#include "launch/loop.h"

#include <asio/executor_work_guard.hpp>
#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/post.hpp>
#include <asio/steady_timer.hpp>

#include <utility>

namespace cohort::launch {

struct Loop::Impl {
  asio::io_context context{1};                                                               // one thread: no locks
  asio::executor_work_guard<asio::io_context::executor_type> guard{context.get_executor()};  // runs until `stop`
};

Loop::Loop() : impl_(std::make_unique<Impl>()) {}
Loop::~Loop() = default;

void Loop::run() { impl_->context.run(); }

void Loop::step() { impl_->context.run_one(); }

void Loop::run_for(std::chrono::steady_clock::duration longest) { impl_->context.run_one_for(longest); }

void Loop::stop() { impl_->context.stop(); }
bool Loop::stopped() const noexcept { return impl_->context.stopped(); }

struct Watch::State : std::enable_shared_from_this<Watch::State> {
  State(asio::io_context& io, int descriptor) : context(io), fd(io), number(descriptor) {
    asio::error_code error;
    fd.assign(descriptor, error);
    always_ready = static_cast<bool>(error);  // epoll refuses regular files
  }

  struct Side {
    std::function<void()> callback;
    bool armed = false;
  };

  void arm(Side& side, asio::posix::descriptor_base::wait_type what) {
    if (side.armed || !side.callback) return;
    side.armed = true;
    auto ready = [self = shared_from_this(), &side, what](const asio::error_code& error) {
      side.armed = false;
      if (self->closed || error == asio::error::operation_aborted || !side.callback) return;
      // Copies the callback, since it may replace itself.
      const auto callback = side.callback;
      callback();
      if (!self->closed) self->arm(side, what);
    };
    if (always_ready) {
      asio::post(context, [ready = std::move(ready)] { ready({}); });
    } else {
      fd.async_wait(what, std::move(ready));
    }
  }

  void close() {
    closed = true;
    reading.callback = nullptr;
    writing.callback = nullptr;
    if (!always_ready) fd.release();  // cancels, and leaves the descriptor to its owner
  }

  asio::io_context& context;
  asio::posix::stream_descriptor fd;
  int number;
  bool always_ready = false;
  bool closed = false;
  Side reading;
  Side writing;
};

Watch::Watch(Loop& loop, int fd) : state_(std::make_shared<State>(loop.impl_->context, fd)) {}

Watch& Watch::operator=(Watch&& other) noexcept {
  if (this != &other) {
    if (state_) state_->close();
    state_ = std::move(other.state_);
  }
  return *this;
}

Watch::~Watch() {
  if (state_) state_->close();
}

void Watch::on_readable(std::function<void()> callback) {
  state_->reading.callback = std::move(callback);
  state_->arm(state_->reading, asio::posix::descriptor_base::wait_read);
}

void Watch::on_writable(std::function<void()> callback) {
  state_->writing.callback = std::move(callback);
  state_->arm(state_->writing, asio::posix::descriptor_base::wait_write);
}

struct Timer::State {
  explicit State(asio::io_context& context) : timer(context) {}
  asio::steady_timer timer;
  bool cancelled = false;
};

Timer::Timer(Loop& loop, std::chrono::steady_clock::duration after, std::function<void()> callback)
    : state_(std::make_shared<State>(loop.impl_->context)) {
  state_->timer.expires_after(after);
  state_->timer.async_wait([state = state_, callback = std::move(callback)](const asio::error_code& error) {
    if (!error && !state->cancelled) callback();
  });
}

Timer& Timer::operator=(Timer&& other) noexcept {
  if (this != &other) {
    if (state_) {
      state_->cancelled = true;
      state_->timer.cancel();
    }
    state_ = std::move(other.state_);
  }
  return *this;
}

Timer::~Timer() {
  if (state_) {
    state_->cancelled = true;
    state_->timer.cancel();
  }
}

}  // namespace cohort::launch
