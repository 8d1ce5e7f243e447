#include "child.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

extern char** environ;

namespace cohort::test {
namespace {

using Clock = std::chrono::steady_clock;

// Variables of a launcher around the tests would be taken for this test's.
bool of_a_launcher(const std::string& name) {
  constexpr const char* kPrefixes[] = {"COHORT_",       "OMPI_",    "PMI_",       "PMIX_",      "SLURM_",
                                       "TORCHELASTIC_", "RANK",     "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                       "MASTER_",       "HOROVOD_", "MPI_LOCAL",  "MV2_",       "JSM_",
                                       "LSB_",          "PET_",     "TF_CONFIG",  "SM_",        "K_MPI_"};
  return std::any_of(std::begin(kPrefixes), std::end(kPrefixes),
                     [&](const char* prefix) { return name.rfind(prefix, 0) == 0; });
}

std::vector<std::string> environment_of(const ChildOptions& options) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('='));
    if (!of_a_launcher(name) && options.environment.count(name) == 0) result.push_back(text);
  }
  for (const auto& [name, value] : options.environment) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

Child::Child(const ChildOptions& options) {
  std::vector<std::string> command = options.command;
  std::vector<std::string> environment = environment_of(options);
  const std::vector<char*> argv = pointers(command);
  const std::vector<char*> envp = pointers(environment);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork");
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    ::dup2(ends[1], 1);
    ::dup2(ends[1], 2);
    if (options.uid && (::setgid(*options.uid) != 0 || ::setuid(*options.uid) != 0)) ::_exit(126);
    ::execve(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  pipe_ = ends[0];
  ::fcntl(pipe_, F_SETFL, O_NONBLOCK);
}

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      pipe_(std::exchange(other.pipe_, -1)),
      status_(other.status_),
      output_(std::move(other.output_)) {}

Child::~Child() {
  if (pid_ > 0 && !status_) {
    kill(SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  if (pipe_ >= 0) ::close(pipe_);
}

void Child::kill(int signal) const { ::kill(pid_, signal); }

// False at the end of the output or of the time.
bool Child::read_some(Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd entry{pipe_, POLLIN, 0};
    if (::poll(&entry, 1, static_cast<int>(left)) <= 0) continue;
    char chunk[4096];
    const ssize_t n = ::read(pipe_, chunk, sizeof chunk);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return false;
    output_.append(chunk, static_cast<std::size_t>(n));
    return true;
  }
}

bool Child::wait_for_output(const std::string& text, std::chrono::seconds limit) {
  const auto deadline = Clock::now() + limit;
  while (output_.find(text) == std::string::npos) {
    if (!read_some(deadline)) return output_.find(text) != std::string::npos;
  }
  return true;
}

int Child::wait(std::chrono::seconds limit) {
  const auto deadline = Clock::now() + limit;
  while (read_some(deadline)) {
  }
  int status = 0;
  while (!status_ && Clock::now() < deadline) {
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    } else {
      ::usleep(2000);
    }
  }
  if (!status_) {
    kill(SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    status_ = -1;
  }
  return *status_;
}

}  // namespace cohort::test
