#include "ps/settlement.h"

#include "base/thread.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace cohort::ps {

Settlement::Settlement(const Settle& question, std::int64_t ended, std::vector<std::uint32_t> others, PlaceOf place_of)
    : question_(question), others_(std::move(others)), place_of_(std::move(place_of)), most_(ended) {
  thread_ = sys::start_without_signals([this] { run(); });
}

Settlement::~Settlement() {
  stopping_ = true;
  thread_.join();
}

void Settlement::run() {
  for (const std::uint32_t server : others_) {
    Settle question = question_;
    question.server = server;
    for (bool answered = false; !answered;) {
      if (stopping_) return;
      try {
        // A short deadline, so that this server can end without waiting for the other one.
        const auto deadline = net::deadline_in(std::chrono::milliseconds(500));
        const net::RpcPlace place = value_or_throw(place_of_(server));
        net::rpc_connect(place, deadline, [&](net::SecureConnection connection, const std::string& at, net::Deadline) {
          net::RpcClient client(std::move(connection), "parameter", at);
          const std::string answer = client.call(static_cast<std::uint8_t>(Method::Settle), pack(question), deadline);
          const auto opened = value_or_throw(unpack<Answer>(answer));
          if (opened.record.error) throw *opened.record.error;
          const auto settled = value_or_throw(codec::decode<Settled>(opened.payload));
          const std::lock_guard lock(mutex_);
          most_ = std::max(most_, settled.committed);
          answered = true;
        });
      } catch (const Error& error) {
        {
          const std::lock_guard lock(mutex_);
          trouble_ = error.what();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    }
  }
  const std::lock_guard lock(mutex_);
  settled_ = true;
}

std::optional<std::int64_t> Settlement::result() const {
  const std::lock_guard lock(mutex_);
  return settled_ ? std::optional(most_) : std::nullopt;
}

std::string Settlement::trouble() const {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

}  // namespace cohort::ps
