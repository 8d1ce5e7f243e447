#include "observe/watch/source.h"

#include "base/files.h"
#include "base/hardware.h"
#include "base/parse.h"
#include "base/thread.h"
#include "base/unique_fd.h"
#include "launch/output/text.h"
#include "net/http.h"
#include "observe/watch/page_text.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <httplib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <future>
#include <thread>
#include <utility>

namespace cohort::watch {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kLongestLive = std::uint64_t{256} << 20;
constexpr std::int64_t kLogBytes = 256 << 10;

/// Text of a line as a terminal or a page shows it.
std::string shown(std::string_view line) {
  // A progress bar overwrites itself, so its last text counts.
  if (const auto back = line.find_last_of('\r'); back != std::string_view::npos && back + 1 < line.size())
    line.remove_prefix(back + 1);
  return launch::plain(line);
}

}  // namespace

RunFiles::RunFiles(fs::path folder) : folder_(std::move(folder)) { view_.place = folder_.string(); }

bool RunFiles::poll() {
  const bool live = read_live();
  const bool usage = read_usage();
  return read_record() || live || usage;
}

bool RunFiles::read_live() {
  const std::string path = (folder_ / launch::kLiveFile).string();
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return false;
  const Version version{status.st_dev, status.st_ino, status.st_size,
                        status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec};
  if (version == live_) return false;
  const auto content = sys::read_file(path, {.max_bytes = kLongestLive});
  if (!content) return false;
  auto run = launch::parse_live_run(content->text());
  if (!run) return false;
  live_ = version;
  view_.run = *std::move(run);
  known_ = true;
  return true;
}

bool RunFiles::read_record() {
  bool changed = false;
  try {
    const fs::path path = folder_ / "run.jsonl";
    if (!record_) {
      if (!fs::exists(path)) return false;
      record_.emplace(path);
    }
    while (record_->next()) {
      changed = true;
      if (!record_->superseded()) progress_.take(record_->line());
    }
  } catch (const Error&) {
    // The record belongs to another run, or cannot be read now, so reading starts again from its beginning.
    record_.reset();
    progress_ = {};
  }
  if (changed) view_.progress = progress_.progress();
  view_.progress.usage = usage_;
  return changed;
}

bool RunFiles::read_usage() {
  bool changed = false;
  try {
    const fs::path path = folder_ / "usage.jsonl";
    if (!usage_record_) {
      if (!fs::exists(path)) return false;
      usage_record_.emplace(path);
      usage_.clear();
      usage_since_ = 0;
    }
    for (; usage_record_->next(); changed = true) {
      if (usage_since_ == 0) usage_since_ = usage_record_->line().time.value_or(0);
      track::PointReader().read(usage_record_->line(), [this](const track::MetricPoint& point) {
        (void)add_value(usage_, point.name, point.value, point.time - usage_since_);
      });
    }
  } catch (const Error&) {
    usage_record_.reset();
  }
  return changed;
}

std::string RunFiles::trouble() const {
  return known_ ? std::string() : fmt::format("waiting for {}", (folder_ / launch::kLiveFile).string());
}

LogTail RunFiles::log(int rank, launch::Stream stream, std::size_t lines) {
  LogTail tail;
  const std::string name = fmt::format("rank-{}.{}", rank, stream == launch::Stream::Stdout ? "out" : "err");
  // The folder may have moved since, or may have another path on this host.
  std::error_code error;
  fs::path folder = view_.run.logs;
  if (folder.empty() || !fs::is_directory(folder, error)) folder = folder_ / "logs";
  tail.path = (folder / name).string();
  const sys::UniqueFd fd(::open(tail.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    tail.why = fmt::format("{}: {}", tail.path, fd ? "it is no regular file" : errno_text(errno));
    return tail;
  }
  std::string bytes(static_cast<std::size_t>(std::min<std::int64_t>(status.st_size, kLogBytes)), '\0');
  const ssize_t got = ::pread(fd.get(), bytes.data(), bytes.size(), status.st_size - static_cast<off_t>(bytes.size()));
  bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  std::string_view rest(bytes);
  if (rest.ends_with('\n')) rest.remove_suffix(1);
  while (!rest.empty() && tail.lines.size() < lines) {
    const auto end = rest.rfind('\n');
    tail.lines.push_back(shown(end == std::string_view::npos ? rest : rest.substr(end + 1)));
    rest = end == std::string_view::npos ? std::string_view() : rest.substr(0, end);
  }
  std::reverse(tail.lines.begin(), tail.lines.end());
  return tail;
}

namespace {

constexpr std::size_t kLongestAnswer = std::size_t{256} << 20;
constexpr auto kTimeout = std::chrono::seconds(3);
constexpr auto kAskEvery = std::chrono::milliseconds(400);

}  // namespace

RemotePage::RemotePage(net::Address address, const net::Secret& token) : address_(std::move(address)), token_(token) {
  view_.place = net::to_string(address_);
  poll();
  if (!trouble_.empty()) raise(ErrorCode::Unavailable, "watching {} failed -- {}", net::to_string(address_), trouble_);
}

Result<std::string> RemotePage::get(const std::string& target) const {
  httplib::Client http(address_.host, address_.port);
  http.set_connection_timeout(kTimeout);
  http.set_read_timeout(kTimeout);
  http.set_write_timeout(kTimeout);
  std::string token;
  token_.append_digits(token);
  std::string body;
  std::packaged_task<httplib::Result()> task([&] {
    return http.Get(target, {{"Host", net::to_string(address_)}, {"Authorization", "Bearer " + token}},
                    [&body](const char* bytes, std::size_t size) {
                      body.append(bytes, size);
                      return body.size() <= kLongestAnswer;
                    });
  });
  std::future<httplib::Result> answered = task.get_future();
  // The library's timeouts hold for one system call, so this thread stops a request whose server answers byte by byte.
  // The library also raises SIGPIPE, so its thread blocks that. A stop before the request has begun is lost.
  std::thread thread = sys::start_without_signals([&task] { task(); });
  while (answered.wait_for(kTimeout) != std::future_status::ready) http.stop();
  thread.join();
  const httplib::Result answer = answered.get();
  if (!answer && body.size() > kLongestAnswer) return fail(ErrorCode::Corrupt, "its answer has no end");
  if (!answer && answer.error() == httplib::Error::Connection)
    return fail(ErrorCode::Unavailable, "it cannot be reached");
  if (!answer) return fail(ErrorCode::Timeout, "it does not answer as a page of `cohort watch`");
  if (answer->status == 200) return body;
  return fail(ErrorCode::Unavailable, "it answers {}: {}", answer->status, net::as_line(body));
}

bool RemotePage::poll() {
  if (std::chrono::steady_clock::now() < next_) return false;
  auto text = get("/data?by=rank");
  next_ = std::chrono::steady_clock::now() + kAskEvery;
  auto view = text ? parse_view(*text) : Result<View>(tl::unexpected(text.error()));
  if (!view) {
    trouble_ = view.error().what();
    return true;
  }
  trouble_.clear();
  view_ = *std::move(view);
  ahead_ = view_.now - launch::seconds_now();
  view_.place = net::to_string(address_);
  return true;
}

LogTail RemotePage::log(int rank, launch::Stream stream, std::size_t lines) {
  LogTail tail;
  tail.path = fmt::format("rank {}, {}", rank, stream == launch::Stream::Stdout ? "stdout" : "stderr");
  auto text = get(fmt::format("/log?rank={}&stream={}", rank, stream == launch::Stream::Stdout ? "out" : "err"));
  if (!text) {
    tail.why = text.error().what();
    return tail;
  }
  for (std::string_view rest(*text); !rest.empty();) {
    const auto end = rest.find('\n');
    tail.lines.emplace_back(rest.substr(0, end));
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  if (tail.lines.size() > lines)
    tail.lines.erase(tail.lines.begin(), tail.lines.end() - static_cast<std::ptrdiff_t>(lines));
  return tail;
}

namespace {

constexpr std::chrono::milliseconds kPollPageEvery{200};
constexpr std::size_t kLogLines = 500;

std::string digits_of(const net::Secret& token) {
  std::string text;
  text.reserve(2 * net::Secret::kBytes);
  token.append_digits(text);
  return text;
}

net::HttpResponse refusal(int status, const std::string& why) { return {.status = status, .body = why + "\n"}; }

}  // namespace

PageServer::PageServer(RunFiles& files, const net::Address& at, const net::Secret& token)
    : files_(files),
      token_(token),
      server_({.at = at,
               .token = digits_of(token),
               .clients = net::HttpClients::Browsers,
               .handler = [this](const net::HttpRequest& request) { return answer(request); }}) {}

std::string PageServer::url() const {
  net::Address at = server_.address();
  if (at.host == "0.0.0.0" || at.host == "::") at.host = sys::host_name();  // a name that can be typed elsewhere
  return fmt::format("http://{}/?token={}", net::to_string(at), digits_of(token_));
}

net::HttpResponse PageServer::answer(const net::HttpRequest& request) {
  // Reads the files when a client asks, but not again for clients at the same moment.
  if (net::passed(poll_again_)) {
    files_.poll();
    poll_again_ = net::deadline_in(kPollPageEvery);
    last_data_.clear();
  }
  if (request.path == "/") return page();
  if (request.path == "/data") return data(request);
  if (request.path == "/log") return log(request);
  return refusal(404, "there is no such page");
}

net::HttpResponse PageServer::page() {
  const std::string nonce = digits_of(value_or_throw(net::Secret::generate()));
  net::HttpResponse response{200, "text/html; charset=utf-8", std::string(kPage)};
  constexpr std::string_view kMark = "NONCE";
  for (auto at = response.body.find(kMark); at != std::string::npos; at = response.body.find(kMark, at))
    response.body.replace(at, kMark.size(), nonce);
  response.headers["Content-Security-Policy"] = fmt::format(
      "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; img-src data:; "
      "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
      nonce);
  return response;
}

net::HttpResponse PageServer::data(const net::HttpRequest& request) {
  const View& view = files_.view();
  net::HttpResponse response{200, "application/json", {}};
  const auto by = request.query.find("by");
  const auto host = request.query.find("host");
  if (host != request.query.end()) {
    const auto index = parse_integer<std::size_t>(host->second);
    if (!index) return refusal(400, "host is a number");
    View part = view;
    part.run = of_host(view.run, *index);
    response.body = to_text(part, Rows::Ranks);
  } else if (by != request.query.end()) {
    response.body = to_text(view, by->second == "host" ? Rows::Hosts : Rows::Ranks);
  } else {
    if (last_data_.empty()) last_data_ = to_text(view, view.run.ranks.size() > kManyRanks ? Rows::Hosts : Rows::Ranks);
    response.body = last_data_;
  }
  return response;
}

net::HttpResponse PageServer::log(const net::HttpRequest& request) {
  const auto rank = request.query.find("rank");
  const auto number = rank == request.query.end() ? std::nullopt : parse_integer<int>(rank->second);
  if (!number || *number < 0 || static_cast<std::size_t>(*number) >= files_.view().run.ranks.size())
    return refusal(404, "there is no such rank");
  const auto stream = request.query.find("stream");
  const bool errors = stream != request.query.end() && stream->second == "err";
  const LogTail tail = files_.log(*number, errors ? launch::Stream::Stderr : launch::Stream::Stdout, kLogLines);
  if (!tail.why.empty()) return refusal(404, tail.why);
  net::HttpResponse response;
  for (const std::string& line : tail.lines) response.body += line + "\n";
  return response;
}

}  // namespace cohort::watch
