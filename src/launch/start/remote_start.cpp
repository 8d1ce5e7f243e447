#include "launch/start/remote_start.h"

#include "base/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <utility>

namespace cohort::launch {
namespace {

constexpr std::size_t kMostKept = 2000;
constexpr std::size_t kLongestSshLine = 8000;

/// The last bytes are the ones that explain.
void keep(std::string& text, std::string_view more) {
  text += more;
  if (text.size() > 2 * kMostKept) text.erase(0, text.size() - kMostKept);
}

/// Of a non-blocking pipe: nullopt once it has ended, empty if there is nothing now.
std::optional<std::string> read_piece(int fd) {
  std::string bytes(4096, '\0');
  ssize_t got = 0;
  do {
    got = ::read(fd, bytes.data(), bytes.size());
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EAGAIN) return std::string();
  if (got <= 0) return std::nullopt;
  bytes.resize(static_cast<std::size_t>(got));
  return bytes;
}

}  // namespace

RemoteStart::RemoteStart(Loop& loop, AgentProcess& process, Invitation invitation, Events events)
    : process_(process),
      invitation_(std::move(invitation)),
      events_(std::move(events)),
      out_(loop, process.out.get()),
      err_(loop, process.err.get()) {
  out_.on_readable([this] { read_out(); });
  err_.on_readable([this] { read_err(); });
}

void RemoteStart::drain() {
  while (process_.err && read_err()) {
  }
  while (process_.out && read_out()) {
  }
}

bool RemoteStart::read_out() {
  const auto piece = read_piece(process_.out.get());
  if (!piece) {
    out_ = Watch();
    process_.out.reset();
    if (!announced_) keep(noise_, std::exchange(line_, {}));
    return false;
  }
  std::string_view rest = *piece;
  while (!announced_ && !rest.empty()) {
    const auto end = rest.find('\n');
    line_ += rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    if (end != std::string_view::npos || line_.size() > kLongestSshLine) take_line(std::exchange(line_, {}));
  }
  return !piece->empty();
}

void RemoteStart::take_line(std::string_view line) {
  const auto announcement = parse_announcement(line);
  if (!announcement) return keep(noise_, std::string(line) + "\n");
  announced_ = true;
  if (const std::string why = difference(own_announcement(), *announcement); !why.empty()) {
    return events_.on_unfit(why);
  }
  // A pipe of 4 KiB takes it at once; where it does not, the agent says that its invitation has not come.
  std::string text = to_text(invitation_);
  const net::Wiping wiping(text);
  const ssize_t put = ::write(process_.lifeline.get(), text.data(), text.size());
  if (put != static_cast<ssize_t>(text.size())) log::info("launch", "the invitation of an agent was not taken");
}

bool RemoteStart::read_err() {
  const auto piece = read_piece(process_.err.get());
  if (!piece) {
    err_ = Watch();
    process_.err.reset();
    return false;
  }
  if (!joined_) {
    keep(complaints_, *piece);
    return !piece->empty();
  }
  error_line_ += *piece;
  for (auto end = error_line_.find('\n'); end != std::string::npos; end = error_line_.find('\n')) {
    const std::string line = error_line_.substr(0, end);
    error_line_.erase(0, end + 1);
    if (!line.empty()) events_.on_complaint(line);
  }
  if (error_line_.size() > kLongestSshLine) events_.on_complaint(std::exchange(error_line_, {}));
  return !piece->empty();
}

namespace {

struct SshSign {
  std::string_view text;
  std::string_view kind;
  std::string_view why;
  std::string_view advice;  ///< {0}: the host, {1}: the ssh command
};

/// What ssh says; the words are OpenSSH's.
constexpr std::array kSshSigns = {
    SshSign{"REMOTE HOST IDENTIFICATION HAS CHANGED", "ssh-key-changed", "its host key is not the one that is known",
            "if it was set up anew: `ssh-keygen -R {0}`, then `{1} {0}` once by hand"},
    SshSign{"Host key verification failed", "ssh-host-key",
            "its host key is not known here, and nobody can answer ssh's question",
            "`{1} {0}` once by hand and answer yes"},
    SshSign{
        "Permission denied", "ssh-login", "ssh cannot log in without a password",
        "make a key and copy it there: `ssh-keygen`, `ssh-copy-id {0}`; `{1} -o BatchMode=yes {0} true` has to work"},
    SshSign{"Too many authentication failures", "ssh-login", "ssh cannot log in without a password",
            "name the one key to use in ~/.ssh/config (IdentityFile, IdentitiesOnly yes)"},
    SshSign{"Could not resolve hostname", "ssh-name", "its name does not resolve here",
            "check its spelling, /etc/hosts and DNS, or give HostName in ~/.ssh/config"},
    SshSign{"Connection refused", "ssh-reach", "no sshd listens there",
            "start sshd on {0}; where it has another port, give Port in ~/.ssh/config"},
    SshSign{"No route to host", "ssh-reach", "there is no route to it",
            "is it up (`ping {0}`), and does no firewall reject what goes to its sshd?"},
    SshSign{"Network is unreachable", "ssh-reach", "there is no route to it", "check the network of this host"},
    SshSign{"timed out", "ssh-reach", "it does not answer",
            "is it up, and does no firewall on the way drop what goes to its sshd? `{1} {0} true`"},
    SshSign{"Bad configuration option", "ssh-config", "ssh's configuration is wrong", "`{1} {0} true` shows the line"},
    SshSign{"Bad owner or permissions", "ssh-config", "ssh refuses its configuration",
            "`chmod 600` the file that it names"},
};

/// Open MPI's mpiruns of one user share a folder in TMPDIR, which one removes while another makes its own in it
/// (open-mpi/ompi#8510); the words are those of its releases before 5.
constexpr std::string_view kNoSessionFolder = "orte_session_dir failed";

/// {0} is the host, {1} the ssh command.
std::string filled(std::string_view advice, const FailedStart& failed) {
  std::string out;
  for (std::size_t at = 0; at < advice.size(); ++at) {
    const std::string_view rest = advice.substr(at);
    const bool host = rest.starts_with("{0}");
    if (host || rest.starts_with("{1}")) {
      out += host ? failed.host : failed.ssh;
      at += 2;
    } else {
      out += advice[at];
    }
  }
  return out;
}

}  // namespace

std::string one_line(std::string_view text) {
  constexpr std::size_t kLongest = 600;
  constexpr std::string_view kCut = "... ";
  const auto byte = [&text](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0; };
  std::string out;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (c == '\n' || c == '\r' || c == '\t') {
      if (!out.empty() && out.back() != ' ') out += ' ';
    } else if (byte(at) == 0xC2 && byte(at + 1) >= 0x80 && byte(at + 1) < 0xA0) {
      ++at;  // the other control characters, as UTF-8 has them
    } else if (byte(at) >= ' ' && c != '\x7f') {
      out += c;
    }
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  if (out.size() <= kLongest) return out;
  std::size_t begin = out.size() - (kLongest - kCut.size());
  while (begin < out.size() && (static_cast<unsigned char>(out[begin]) & 0xC0) == 0x80) ++begin;  // within a character
  return std::string(kCut) + out.substr(begin);
}

Diagnosis diagnose(const FailedStart& failed) {
  Diagnosis out;
  const std::string said = one_line(failed.complaints);
  const std::string printed = one_line(failed.noise);
  if (!said.empty()) out.said = fmt::format(" -- it said: {}", said);
  if (!printed.empty()) out.said += fmt::format(" -- stdout had: {}", printed);
  const auto is = [&](std::string_view kind, std::string why, std::string_view advice) {
    out.kind = kind;
    out.why = std::move(why);
    out.advice = filled(advice, failed);
    return out;
  };
  if (failed.announced) {
    return is("control",
              failed.status ? fmt::format("the agent began and ended ({})", sys::to_string(*failed.status))
                            : std::string("the agent began, and has not connected"),
              "can {0} open connections to this host (a firewall)?");
  }
  if (!failed.status) {
    if (failed.method == StartMethod::Ssh)
      return is(
          "silent", "no sign of life",
          "`{1} -o BatchMode=yes {0} true` has to end by itself; does a firewall drop what goes to its sshd, or a "
          "start-up file of the shell there (.bashrc, .profile) wait for something?");
    return is("silent", "no sign of life",
              failed.method == StartMethod::Slurm ? "is there room for a step? `squeue -s`, `sinfo -N`" : "");
  }
  const int code = failed.status->shell_status();
  if (failed.method == StartMethod::Ssh && code == 255) {
    for (const SshSign& sign : kSshSigns) {
      if (failed.complaints.find(sign.text) != std::string::npos)
        return is(sign.kind, std::string(sign.why), sign.advice);
    }
    return is("ssh-reach", "ssh failed", "`{1} -o BatchMode=yes {0} true` has to work");
  }
  if (code == 126 || code == 127) {
    return is("command", fmt::format("{} cannot be started there (status {})", failed.command, code),
              "install Cohort at the same path on every host, or give its path there with --remote-cohort");
  }
  if (failed.method == StartMethod::Ssh) {
    return is("shell-exits", fmt::format("the shell there ended with status {} before the agent began", code),
              "a start-up file of the shell (.bashrc, .profile, .cshrc) ends it: what is not for logins without a "
              "terminal has to stand behind `case $- in *i*) ;; *) return;; esac`");
  }
  return is("starter", fmt::format("{} ended ({})", start_method_name(failed.method), sys::to_string(*failed.status)),
            is_transient(failed) ? "it could not make its folder in TMPDIR (else /tmp): may you write there?" : "");
}

bool is_transient(const FailedStart& failed) {
  return failed.method == StartMethod::Mpi && !failed.announced && failed.status && !failed.status->success() &&
         failed.complaints.find(kNoSessionFolder) != std::string::npos;
}

std::string explain(const FailedStart& failed) {
  const Diagnosis found = diagnose(failed);
  std::string out = fmt::format("no agent on {} -- by {}: {}{}", failed.host, start_method_name(failed.method),
                                found.why, found.said);
  if (!found.advice.empty()) out += " -- " + found.advice;
  return out;
}

}  // namespace cohort::launch
