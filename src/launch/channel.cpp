#include "launch/channel.h"

#include "net/socket.h"

#include <utility>

namespace cohort::launch {

net::SecureOptions control_options() {
  net::SecureOptions options;
  options.purpose = "control";
  options.longest_message = kLongestMessage;
  return options;
}

Channel::Channel(Loop& loop, net::SecureConnection connection, OnMessage on_message, OnClosed on_closed)
    : loop_(loop),
      connection_(std::move(connection)),
      watch_(loop, connection_.fd()),
      on_message_(std::move(on_message)),
      on_closed_(std::move(on_closed)) {
  begun_ = Timer(loop, {}, [this] { advance(); });
  watch_.on_readable([this] { advance(); });
  update_interest();
}

void Channel::send(const Message& message) {
  if (closed_) return;
  if (auto queued = connection_.queue(encode(message)); !queued) return close(queued.error());
  update_interest();
}

void Channel::watch_link(std::chrono::milliseconds longest) {
  if (closed_) return;
  net::watch_link(connection_.fd());
  look_at_link(longest);
}

std::chrono::milliseconds Channel::silence() const {
  return closed_ ? std::chrono::milliseconds(0)
                 : net::link_silence(connection_.fd()).value_or(std::chrono::milliseconds(0));
}

void Channel::look_at_link(std::chrono::milliseconds longest) {
  const auto silence = net::link_silence(connection_.fd());
  if (silence && *silence > longest) {
    return close(Error(ErrorCode::PeerLost,
                       fmt::format("nothing has come from {} for {:.1f} s: the link is cut, or the host is down",
                                   peer(), std::chrono::duration<double>(*silence).count())));
  }
  link_ = Timer(loop_, std::chrono::milliseconds(100), [this, longest] { look_at_link(longest); });
}

void Channel::advance() {
  if (closed_) return;
  const auto moved = connection_.advance();
  // What came before the end still counts.
  while (!closed_) {
    auto bytes = connection_.next_message();
    if (!bytes) break;
    auto message = decode(*bytes);
    if (!message) return close(message.error());
    on_message_(*std::move(message));
  }
  if (closed_) return;
  if (!moved) return close(moved.error());
  if (connection_.at_end()) return close(std::nullopt);
  update_interest();
}

void Channel::update_interest() {
  if (closed_) return;
  const bool wanted = connection_.wants_write();
  if (wanted == wants_write_) return;
  wants_write_ = wanted;
  if (wanted) {
    watch_.on_writable([this] { advance(); });
  } else {
    watch_.on_writable(nullptr);
  }
}

void Channel::close(std::optional<Error> error) {
  if (closed_) return;
  closed_ = true;
  begun_ = Timer();
  link_ = Timer();
  watch_ = Watch();
  on_closed_(std::move(error));
}

}  // namespace cohort::launch
