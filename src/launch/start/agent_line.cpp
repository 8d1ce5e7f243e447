#include "launch/start/agent_line.h"

#include <utility>

namespace cohort::launch {

void AgentLine::send(const Message& message) {
  if (numbers_)
    pass(numbers_->add(encode(message)));
  else if (own_)
    own_->send(message);
}

void AgentLine::pass(Relayed relayed) {
  Channel* const through = own_ ? own_.get() : router_;
  if (through != nullptr) through->send(std::move(relayed));
}

std::chrono::milliseconds AgentLine::silence() const {
  if (own_) return own_->silence();
  return silent_ || router_ == nullptr ? std::chrono::milliseconds::max() : router_->silence();
}

void AgentLine::connect(std::unique_ptr<Channel> own) {
  own_ = std::move(own);
  router_ = nullptr;
  given_up_ = Timer();
  if (!numbers_) return;
  for (Relayed& relayed : numbers_->again()) pass(std::move(relayed));
}

void AgentLine::connect(Channel& router, const std::string& address) {
  router_ = &router;
  address_ = address;
  silent_ = false;
  given_up_ = Timer();
  for (Relayed& relayed : numbers_->again()) pass(std::move(relayed));
}

void AgentLine::disconnect(Loop& loop, std::chrono::milliseconds limit, std::function<void()> given_up) {
  router_ = nullptr;
  on_given_up_ = std::move(given_up);
  given_up_ = Timer(loop, limit, [this] { give_up(); });
}

void AgentLine::give_up() {
  if (!given_up_) return;
  given_up_ = Timer();
  const auto given_up = std::move(on_given_up_);  // the timer's own function has ended
  given_up();
}

Result<std::optional<Message>> AgentLine::take(const Relayed& relayed) {
  if (!numbers_) return fail(ErrorCode::Corrupt, "a numbered message of an agent that sends none");
  auto taken = numbers_->take(relayed);
  if (numbers_->owes_acknowledgement()) pass(numbers_->acknowledgement());
  return taken;
}

}  // namespace cohort::launch
