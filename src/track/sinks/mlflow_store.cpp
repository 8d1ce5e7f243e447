#include "track/sinks/mlflow_store.h"

#include "base/parse.h"
#include "base/result.h"
#include "net/http.h"
#include "sys/files.h"
#include "track/sinks/mlflow_store.py.h"

#include <fmt/format.h>

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>

namespace cohort::track {
namespace {

constexpr auto kStartTime = std::chrono::minutes(5);  // it imports MLflow, and may make a database

/// The line that it says first; what there is of it where it ends, or the time is over.
std::string first_line(int from) {
  std::string line;
  const auto until = std::chrono::steady_clock::now() + kStartTime;
  while (line.find('\n') == std::string::npos) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    pollfd waiting{from, POLLIN, 0};
    const int ready = left.count() <= 0 ? 0 : ::poll(&waiting, 1, static_cast<int>(left.count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) return fmt::format("it has said nothing for {} s", std::chrono::seconds(kStartTime).count());
    char bytes[512];
    const ssize_t got = ::read(from, bytes, sizeof bytes);
    if (got <= 0) break;
    line.append(bytes, static_cast<std::size_t>(got));
  }
  return line.substr(0, line.find('\n'));
}

}  // namespace

MlflowStore::MlflowStore(const std::string& uri) {
  token_ = sys::random_hex(16);
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    raise(ErrorCode::Unavailable, "socketpair: {}", errno_text(errno));
  }
  const sys::UniqueFd ours(ends[0]);
  sys::UniqueFd theirs(ends[1]);
  sys::SpawnOptions spawn{.path = "/usr/bin/env",
                          .arguments = {"env", "python3", "-c", std::string(kMlflowStoreProgram), uri},
                          .environment = {},
                          .folder = {}};
  for (char** one = environ; *one != nullptr; ++one) spawn.environment.emplace_back(*one);
  spawn.stdin_fd = spawn.stdout_fd = theirs.get();
  spawn.group = sys::Group::Own;  // a Ctrl-C is for this process
  spawn.parent_death_signal = SIGKILL;
  auto pending = sys::spawn(spawn);
  auto child = pending ? std::move(*pending).confirm() : tl::unexpected(pending.error());
  if (!child) raise(ErrorCode::Unavailable, "cannot start {}: {}", spawn.path, sys::to_string(child.error()));
  process_ = *std::move(child);
  theirs.reset();
  const std::string line = token_ + "\n";
  (void)::send(ours.get(), line.data(), line.size(), MSG_NOSIGNAL);
  const std::string said = first_line(ours.get());
  const auto port = parse_integer<std::uint16_t>(said);
  if (!port) {
    end();
    raise(ErrorCode::Unavailable,
          "opening MLflow's store {} failed -- {} -- the MLflow of python3 in PATH opens it (pip install mlflow); or "
          "start "
          "a server over it, mlflow server, and give mlflow:http://127.0.0.1:5000",
          uri, said.empty() ? "python3 has ended" : net::as_line(said));
  }
  server_ = fmt::format("http://127.0.0.1:{}", *port);
}

MlflowStore::~MlflowStore() { end(); }

void MlflowStore::end() const {
  ::kill(process_.pid, SIGKILL);  // what it has answered is in the store
  while (::waitpid(process_.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

bool MlflowStore::has_ended() const {
  pollfd waiting{process_.pidfd.get(), POLLIN, 0};
  return ::poll(&waiting, 1, 0) > 0;
}

}  // namespace cohort::track
