#include "launch/start/invitation.h"

#include "base/files.h"
#include "base/hardware.h"
#include "base/memory.h"
#include "base/parse.h"
#include "base/process.h"
#include "base/unique_fd.h"
#include "launch/messages.h"
#include "launch/processes.h"
#include "launch/start/starter.h"
#include "launch/version.h"
#include "net/http.h"
#include "net/secret.h"
#include "net/socket.h"
#include "rendezvous/exchange.h"

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

constexpr std::string_view kMark = "cohort-agent-is-here";
constexpr std::size_t kMostAddresses = 64;
constexpr std::size_t kLongestPath = 4096;

/// Replaces control characters, since tabs and line ends separate fields.
std::string plain(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  }
  return text;
}

std::optional<std::string_view> after(std::string_view line, std::string_view word) {
  if (!line.starts_with(word) || line.size() <= word.size() || line[word.size()] != ' ') return std::nullopt;
  return line.substr(word.size() + 1);
}

}  // namespace

Announcement own_announcement() {
  Announcement out;
  out.protocol = kProtocol;
  out.version = kVersion;
  out.build = fmt::format("{}, {}", kCompiler, kBuildType);
  out.host = sys::host_name();
  out.path = own_command().value_or("?");
  return out;
}

std::string to_line(const Announcement& announcement) {
  return fmt::format("{}\t{}\t{}\t{}\t{}\t{}", kMark, announcement.protocol, plain(announcement.version),
                     plain(announcement.build), plain(announcement.host), plain(announcement.path));
}

std::optional<Announcement> parse_announcement(std::string_view line) {
  const auto mark = line.find(kMark);
  if (mark == std::string_view::npos) return std::nullopt;
  line.remove_prefix(mark);
  if (line.ends_with('\r')) line.remove_suffix(1);
  std::vector<std::string_view> fields;
  while (true) {
    const auto tab = line.find('\t');
    fields.push_back(line.substr(0, tab));
    if (tab == std::string_view::npos) break;
    line.remove_prefix(tab + 1);
  }
  if (fields.size() != 6 || fields[0] != kMark) return std::nullopt;
  const auto protocol = parse_integer<std::uint32_t>(fields[1]);
  if (!protocol) return std::nullopt;
  // The host is not authenticated yet, and its fields are shown to people.
  return Announcement{*protocol, net::as_line(fields[2]), net::as_line(fields[3]), net::as_line(fields[4]),
                      net::as_line(fields[5], kLongestPath)};
}

std::string difference(const Announcement& here, const Announcement& there) {
  const auto differ = [&](std::string_view what, std::string_view ours, std::string_view theirs) {
    return fmt::format(
        "{} is {} on {} ({}) and {} on {} ({}); install the same one on all hosts, or name it with --remote-cohort",
        what, theirs, there.host, there.path, ours, here.host, here.path);
  };
  if (here.version != there.version) return differ("Cohort", here.version, there.version);
  if (here.protocol != there.protocol)
    return differ("Cohort's protocol", std::to_string(here.protocol), std::to_string(there.protocol));
  if (here.build != there.build) return differ("Cohort's build", here.build, there.build);
  return {};
}

std::string to_text(const Invitation& invitation) {
  std::string rest = fmt::format("\nhost {}\nsilence {}\n", invitation.host_index, invitation.host_timeout.count());
  for (const net::Endpoint& endpoint : invitation.supervisor) rest += "address " + net::to_string(endpoint.tcp) + "\n";
  for (const net::Endpoint& endpoint : invitation.router) rest += "router " + net::to_string(endpoint.tcp) + "\n";
  if (invitation.routes) rest += "routes\n";
  rest += kInvitationEnd;
  std::string text = "secret ";
  text.reserve(text.size() + 2 * net::Secret::kBytes + rest.size());
  invitation.secret.append_digits(text);
  return text += rest;
}

Result<Invitation> parse_invitation(std::string_view text) {
  std::optional<net::Secret> secret;
  std::optional<int> host, silence;
  std::vector<net::Endpoint> supervisor, router;
  bool routes = false;
  if (!text.ends_with(kInvitationEnd)) return fail(ErrorCode::Corrupt, "the invitation has no end");
  text.remove_suffix(kInvitationEnd.size());
  while (!text.empty()) {
    const auto end = text.find('\n');
    if (end == std::string_view::npos) return fail(ErrorCode::Corrupt, "the invitation's last line has no end");
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    if (const auto digits = after(line, "secret"); digits && !secret) {
      secret = net::Secret::from_digits(*digits);
      if (!secret) return fail(ErrorCode::Corrupt, "the invitation's secret is none");
    } else if (const auto number = after(line, "host"); number && !host) {
      host = parse_integer<int>(*number);
      if (!host || *host < 0) return fail(ErrorCode::Corrupt, "the invitation's host is no number");
    } else if (const auto limit = after(line, "silence"); limit && !silence) {
      silence = parse_integer<int>(*limit);
      if (!silence || *silence < 1) return fail(ErrorCode::Corrupt, "the invitation's limit of silence is no number");
    } else if (const auto address = after(line, "address"); address && supervisor.size() < kMostAddresses) {
      auto parsed = net::parse_address(*address);
      if (!parsed) return fail(ErrorCode::Corrupt, "an address of the invitation is none");
      supervisor.push_back({*parsed, {}});
    } else if (const auto through = after(line, "router"); through && router.size() < kMostAddresses) {
      auto parsed = net::parse_address(*through);
      if (!parsed) return fail(ErrorCode::Corrupt, "an address of the invitation's router is none");
      router.push_back({*parsed, {}});
    } else if (line == "routes" && !routes) {
      routes = true;
    } else {
      return fail(ErrorCode::Corrupt, "the invitation has a line that is not understood");
    }
  }
  if (!secret || !host || !silence || supervisor.empty())
    return fail(ErrorCode::Corrupt, "the invitation is not complete");
  return Invitation{*secret,           *host, std::move(supervisor), std::chrono::milliseconds(*silence),
                    std::move(router), routes};
}

namespace {

constexpr const char* kKey = "cohort-run";
constexpr std::size_t kLongestWord = 8192;
/// Tags of the child's reply: success or failure, then the offer or the reason.
constexpr char kGood = '+';
constexpr char kTimeout = 't';
constexpr char kBad = '-';

/// Runs in the child. Returns the tagged answer, and the exchange, which goes on answering the others.
std::pair<std::string, std::shared_ptr<rendezvous::Exchange>> exchange_offers(
    const rendezvous::Detected& step, const rendezvous::Environment& environment,
    const std::optional<rendezvous::InitOffer>& mine, net::Deadline deadline) {
  const auto failed = [](const Error& error) {
    return (error.code() == ErrorCode::Timeout ? kTimeout : kBad) + std::string(error.what());
  };
  auto exchange = rendezvous::open_exchange(step, environment);
  if (!exchange) return {failed(exchange.error()), nullptr};
  if ((*exchange)->rank() != step.rank || (*exchange)->size() != step.size) {
    return {fmt::format("{}{} says task {} of {}", kBad, (*exchange)->name(), (*exchange)->rank(), (*exchange)->size()),
            nullptr};
  }
  std::optional<std::string> text;
  if (mine) {
    auto encoded = rendezvous::encode(*mine, (*exchange)->longest_value());
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

/// Reads until the end; a child that dies sends nothing.
Result<std::string> read_answer(int fd, net::Deadline deadline) {
  std::string text;
  text.reserve(kLongestWord);  // so that the secret is never copied by growth
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

Result<rendezvous::InitOffer> meet_in_step(const rendezvous::Detected& step, const rendezvous::Environment& environment,
                                           const std::optional<rendezvous::InitOffer>& mine, net::Deadline deadline) {
  auto pipe = make_pipe();
  if (!pipe) return tl::unexpected(pipe.error());
  auto& [from_child, to_parent] = *pipe;
  std::fflush(nullptr);  // otherwise the child's `exit` would write buffered output again
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return fail(ErrorCode::Unavailable, "{}", sys::to_string(sys::SpawnFailure{errno, "fork"}));
  if (child == 0) {
    from_child.reset();
    ::signal(SIGPIPE, SIG_IGN);
    sys::lock_hidden_memory();
    if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || ::getppid() != parent) ::_exit(1);
    auto [answer, exchange] = exchange_offers(step, environment, mine, deadline);
    (void)sys::write_all(to_parent.get(), answer);
    net::wipe(answer);
    to_parent.reset();
    if (exchange != nullptr) exchange->wait_told();
    exchange.reset();
    std::exit(0);  // `exit` lets PMI finish in good order
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
                "Else name the place: --nnodes {} --node-rank $SLURM_PROCID --master-addr HOST --secret-file FILE",
                step.source, why, step.size);
  };
  if (!answer) return failed(answer.error().code(), answer.error().what());
  const net::Wiping wiping(*answer);
  if (answer->empty()) return failed(ErrorCode::Unavailable, "the process that asks for them has died");
  const std::string_view rest = std::string_view(*answer).substr(1);
  if (answer->front() != kGood)
    return failed(answer->front() == kTimeout ? ErrorCode::Timeout : ErrorCode::Unavailable, rest);
  auto offer = rendezvous::decode_offer(rest);
  if (offer && !offer->secret) return fail(ErrorCode::Corrupt, "the launcher of task 0 has said no secret");
  return offer;
}

}  // namespace cohort::launch
