#include "launch/start/step_meeting.h"

#include "meet/exchange.h"
#include "net/secret.h"
#include "net/socket.h"
#include "sys/memory.h"
#include "sys/process.h"
#include "sys/unique_fd.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

namespace cohort::launch {
namespace {

constexpr const char* kKey = "cohort-run";
constexpr std::size_t kLongestWord = 8192;
/// What the child says: how it went, then the offer or the reason.
constexpr char kGood = '+';
constexpr char kTimeout = 't';
constexpr char kBad = '-';

/// In the child. The answer, whose first letter says what it is; the exchange, to go on telling the others.
std::pair<std::string, std::shared_ptr<meet::Exchange>> exchange_offers(const cluster::Detected& step,
                                                                        const cluster::Environment& environment,
                                                                        const std::optional<meet::JoinOffer>& mine,
                                                                        net::Deadline deadline) {
  const auto failed = [](const Error& error) {
    return (error.code() == ErrorCode::Timeout ? kTimeout : kBad) + std::string(error.what());
  };
  auto exchange = meet::open_exchange(step, environment);
  if (!exchange) return {failed(exchange.error()), nullptr};
  if ((*exchange)->rank() != step.rank || (*exchange)->size() != step.size) {
    return {fmt::format("{}{} says task {} of {}", kBad, (*exchange)->name(), (*exchange)->rank(), (*exchange)->size()),
            nullptr};
  }
  std::optional<std::string> text;
  if (mine) {
    auto encoded = meet::encode(*mine, (*exchange)->longest_value());
    if (!encoded) return {failed(encoded.error()), nullptr};
    text = *std::move(encoded);
  }
  auto shared = (*exchange)->share(kKey, text, deadline);
  if (text) net::wipe(*text);
  if (!shared) return {failed(shared.error()), nullptr};
  std::string answer;
  answer.reserve(shared->size() + 1);
  answer.append(1, kGood).append(*shared);
  net::wipe(*shared);
  return {std::move(answer), *std::move(exchange)};
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t put = ::write(fd, text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(put));
  }
}

/// Until its end; a child that dies says nothing.
Result<std::string> read_answer(int fd, net::Deadline deadline) {
  std::string text;
  text.reserve(kLongestWord);  // so that it stays in one place
  while (text.size() < kLongestWord) {
    const auto ready = net::wait_ready(fd, POLLIN, deadline);
    if (!ready) return tl::unexpected(ready.error());
    if (!*ready) return fail(ErrorCode::Timeout, "not all launchers of the step have come in time");
    char bytes[512];
    const ssize_t got = ::read(fd, bytes, sizeof bytes);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) return text;
    text.append(bytes, static_cast<std::size_t>(got));
    ::explicit_bzero(bytes, sizeof bytes);
  }
  return text;
}

}  // namespace

Result<meet::JoinOffer> meet_in_step(const cluster::Detected& step, const cluster::Environment& environment,
                                     const std::optional<meet::JoinOffer>& mine, net::Deadline deadline) {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) return fail(ErrorCode::Unavailable, "pipe: {}", errno_text(errno));
  sys::UniqueFd from_child(ends[0]), to_parent(ends[1]);
  std::fflush(nullptr);  // the child ends in good order, and what is in buffers would be written twice
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return fail(ErrorCode::Unavailable, "{}", sys::to_string(sys::SpawnFailure{errno, "fork"}));
  if (child == 0) {
    from_child.reset();
    ::signal(SIGPIPE, SIG_IGN);
    sys::lock_hidden_memory();
    if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || ::getppid() != parent) ::_exit(1);
    auto [answer, exchange] = exchange_offers(step, environment, mine, deadline);
    write_all(to_parent.get(), answer);
    net::wipe(answer);
    to_parent.reset();
    if (exchange != nullptr) exchange->wait_told();
    exchange.reset();
    std::exit(0);  // PMI is left in good order
  }
  to_parent.reset();
  auto answer = read_answer(from_child.get(), deadline);
  const bool over = !mine || !answer || answer->empty() || answer->front() != kGood;
  if (over) {
    if (!answer) ::kill(child, SIGKILL);
    while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  const auto failed = [&step](ErrorCode code, std::string_view why) {
    return fail(code,
                "the launchers of this step cannot find each other ({}): {} -- is `cohort run` every task's command? "
                "Else name the place: --nnodes {} --node-rank $SLURM_PROCID --master HOST:PORT --secret-file FILE",
                step.source, why, step.size);
  };
  if (!answer) return failed(answer.error().code(), answer.error().what());
  const net::Wiping wiping(*answer);
  if (answer->empty()) return failed(ErrorCode::Unavailable, "the process that asks for them has died");
  const std::string_view rest = std::string_view(*answer).substr(1);
  if (answer->front() != kGood)
    return failed(answer->front() == kTimeout ? ErrorCode::Timeout : ErrorCode::Unavailable, rest);
  auto offer = meet::decode_offer(rest);
  if (offer && !offer->secret) return fail(ErrorCode::Corrupt, "the launcher of task 0 has said no secret");
  return offer;
}

}  // namespace cohort::launch
