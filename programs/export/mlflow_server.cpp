#include "export/mlflow.h"

#include "base/env.h"
#include "base/files.h"
#include "base/json.h"
#include "base/parse.h"
#include "base/result.h"
#include "export/mlflow_store.py.h"
#include "net/http.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <httplib.h>
#include <sys/file.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <utility>

namespace cohort::track {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kConnectTime = std::chrono::seconds(5);
constexpr auto kAnswerTime = std::chrono::seconds(120);  // a database under load is slow
constexpr milliseconds kLongestWait = std::chrono::seconds(15);
constexpr int kTriesOfAFile = 3;

bool is_permanent(httplib::Error error) {
  return error == httplib::Error::SSLServerVerification || error == httplib::Error::SSLLoadingCerts;
}

std::string why(httplib::Error error) {
  switch (error) {
    case httplib::Error::Connection: return "it cannot be reached";
    case httplib::Error::ConnectionTimeout: return "the connection is not answered";
    case httplib::Error::Read: return "its answer did not come";
    case httplib::Error::Write: return "it takes no request";
    case httplib::Error::SSLConnection: return "TLS failed";
    default: return httplib::to_string(error);
  }
}

}  // namespace

struct MlflowServer::Impl {
  Impl(MlflowServerOptions from, std::unique_ptr<MlflowStore> own)
      : options(std::move(from)), store(std::move(own)), client(open(options.place)) {
    const MlflowPlace& place = options.place;
    client.set_keep_alive(true);
    client.set_tcp_nodelay(true);
    client.set_url_encode(false);
    client.set_connection_timeout(kConnectTime);
    client.set_read_timeout(kAnswerTime);
    client.set_write_timeout(kAnswerTime);
    client.enable_server_certificate_verification(place.checks_certificate);
    if (!place.certificates.empty()) client.set_ca_cert_path(place.certificates);
    if (!place.token.empty())
      client.set_bearer_token_auth(place.token);
    else if (!place.user.empty())
      client.set_basic_auth(place.user, place.password);
  }

  static httplib::Client open(const MlflowPlace& place) {
    return place.own_certificate.empty() ? httplib::Client(place.server)
                                         : httplib::Client(place.server, place.own_certificate, place.own_certificate);
  }

  std::string path_of(const std::string& path) const { return options.place.prefix + "/api/2.0/" + path; }

  [[noreturn]] void fail(const std::string& reason, std::string_view advice) const {
    raise(ErrorCode::Unavailable, "talking to MLflow failed -- {} -- {} -- {}", options.place.shown(), reason, advice);
  }

  /// Throws if the server refuses this client, or redirects it.
  void check_admission(const Answer& answer, const std::string& location) const {
    if (answer.status == 403 && answer.body.find("Invalid Host header") != std::string::npos) {
      fail(
          "it answers 403, Invalid Host header: it takes requests for names that it knows only, which are localhost "
          "and "
          "private addresses",
          "start the server with --allowed-hosts NAME (or MLFLOW_SERVER_ALLOWED_HOSTS=NAME), where NAME is the host of "
          "the address above, or use its address");
    }
    if (answer.status == 401 || answer.status == 403) {
      fail(fmt::format("it answers {}{}{}", answer.status, answer.message.empty() ? "" : ": ", answer.message),
           options.place.token.empty() && options.place.user.empty()
               ? "it was asked without credentials: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and "
                 "MLFLOW_TRACKING_PASSWORD, have them"
               : "what the environment has for it (MLFLOW_TRACKING_TOKEN, _USERNAME, _PASSWORD, DATABRICKS_TOKEN) does "
                 "not do");
    }
    if (answer.status >= 300 && answer.status < 400) {
      fail(fmt::format("it sends its askers to {}", net::as_line(location)),
           "give that address, if it is the right one");
    }
  }

  Answer ask(const std::function<httplib::Result()>& request, const std::function<bool()>& done_already = {},
             int most_tries = std::numeric_limits<int>::max()) {
    Clock::time_point since = Clock::now();
    milliseconds pause = options.first_wait;
    for (int tries = 1;; ++tries) {
      if (tries > 1 && done_already && done_already()) return {.status = 200, .code = {}, .message = {}, .body = {}};
      const httplib::Result result = request();
      std::string trouble;
      if (result) {
        Answer answer = read(*result);
        check_admission(answer, result->get_header_value("Location"));
        if (answer.status < 500 && answer.status != 429 && answer.status != 408) {
          answered = true;
          if (std::exchange(away, false)) options.say(fmt::format("MLflow at {} answers again", options.place.shown()));
          return answer;
        }
        trouble = fmt::format("it answers {}{}{}", answer.status, answer.message.empty() ? "" : ": ", answer.message);
      } else {
        if (is_permanent(result.error())) {
          fail("its certificate is not trusted",
               "MLFLOW_TRACKING_SERVER_CERT_PATH names a file of certificates that are; "
               "MLFLOW_TRACKING_INSECURE_TLS=true "
               "trusts any");
        }
        if (store && store->has_ended()) fail("the process that had opened it has ended", "export again: it goes on");
        trouble = why(result.error());
      }
      client.stop();  // the connection may have unread data
      if (tries >= most_tries) fail(trouble, fmt::format("it was asked {} times", tries));
      if (tries == 2 && !std::exchange(away, true)) {
        options.say(
            fmt::format("MLflow at {}: {}; trying on, the record keeps what there is", options.place.shown(), trouble));
      }
      // An address that has never answered is more often wrong than temporarily unreachable.
      if (Clock::now() - since >= (answered ? options.patience : options.patience / 15))
        fail(trouble, "it was asked again and again");
      if (options.wait(pause)) fail(trouble, "stopped while it was away");
      pause = std::min(2 * pause, kLongestWait);
    }
  }

  static Answer read(const httplib::Response& response) {
    Answer answer{.status = response.status, .code = {}, .message = {}, .body = response.body};
    if (answer.good()) return answer;
    const auto json = parse_json_or_discard(response.body);
    answer.code = text_in(json, "error_code");
    answer.message = net::as_line(json.is_object() ? text_in(json, "message") : response.body);
    return answer;
  }

  MlflowServerOptions options;
  std::unique_ptr<MlflowStore> store;  // without a server
  httplib::Client client;
  bool answered = false, away = false;
};

MlflowServer::MlflowServer(MlflowServerOptions options) {
  std::unique_ptr<MlflowStore> store;
  if (MlflowPlace& place = options.place; !place.store.empty()) {
    store = std::make_unique<MlflowStore>(place.store);
    place.server = store->server();
    place.token = store->token();
  }
  impl_ = std::make_unique<Impl>(std::move(options), std::move(store));
}
MlflowServer::~MlflowServer() = default;

MlflowServer::Answer MlflowServer::get(const std::string& path) {
  return impl_->ask([&, whole = impl_->path_of(path)] { return impl_->client.Get(whole); });
}

MlflowServer::Answer MlflowServer::post(const std::string& path, const std::string& body,
                                        const std::function<bool()>& done_already) {
  return impl_->ask([&, whole = impl_->path_of(path)] { return impl_->client.Post(whole, body, "application/json"); },
                    done_already);
}

MlflowServer::Answer MlflowServer::put_file(const std::string& path, const std::filesystem::path& file) {
  const auto put = [&, whole = impl_->path_of(path)] {
    std::ifstream in(file, std::ios::binary);
    std::error_code error;
    const std::uintmax_t size = std::filesystem::file_size(file, error);
    if (!in || error) raise(ErrorCode::Io, "{} cannot be read", file.string());
    const auto provide = [&in](std::size_t, std::size_t most, httplib::DataSink& sink) {
      char block[65536];
      in.read(block, static_cast<std::streamsize>(std::min(most, sizeof block)));
      return in.gcount() > 0 && sink.write(block, static_cast<std::size_t>(in.gcount()));
    };
    return impl_->client.Put(whole, static_cast<std::size_t>(size), provide, "application/octet-stream");
  };
  return impl_->ask(put, {}, kTriesOfAFile);
}

void MlflowServer::refused(const std::string& what, const Answer& answer) const {
  raise(ErrorCode::Unavailable, "{} failed -- {} -- {} {}: {}", what, impl_->options.place.shown(), answer.status,
        answer.code, answer.message);
}

nlohmann::json body_of(const MlflowServer::Answer& answer) {
  auto json = parse_json_or_discard(answer.body);
  return json.is_object() ? json : nlohmann::json::object();
}

namespace {

constexpr auto kStartTime = std::chrono::minutes(5);  // the process imports MLflow, and may create a database

}  // namespace

MlflowStore::MlflowStore(const std::string& uri) : token_(sys::random_hex(16)), child_(kMlflowStoreProgram, {uri}) {
  (void)child_.say(token_ + "\n");
  const std::string said = child_.line(kStartTime);
  const auto port = parse_integer<std::uint16_t>(said);
  if (!port) {
    raise(ErrorCode::Unavailable,
          "opening MLflow's store {} failed -- {} -- the MLflow of python3 in PATH opens it (pip install mlflow); or "
          "start "
          "a server over it, mlflow server, and give mlflow:http://127.0.0.1:5000",
          uri, said.empty() ? "python3 has ended" : net::as_line(said));
  }
  server_ = fmt::format("http://127.0.0.1:{}", *port);
}

namespace {

constexpr std::size_t kLongestKey = 250;

}  // namespace

std::string shortened(std::string text, std::size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
  text.resize(most);
  return text;
}

std::string mlflow_key(std::string_view name) {
  std::string key;
  // Normalizes a path: no empty parts, none that are dots alone.
  while (!name.empty()) {
    const std::string_view part = take_until(name, "/");
    if (part.empty()) continue;
    if (!key.empty()) key += '/';
    const bool dots = part == "." || part == "..";
    for (const char c : part) {
      const auto byte = static_cast<unsigned char>(c);
      const bool good =
          std::isalnum(byte) != 0 || byte >= 0x80 || std::string_view("_-. :").find(c) != std::string_view::npos;
      key += good && !dots ? c : '_';
    }
  }
  key = shortened(std::move(key), kLongestKey);
  while (key.ends_with('/')) key.pop_back();
  return key.empty() ? "_" : key;
}

namespace {

constexpr std::size_t kMostBytes = 4096;

std::string digest(std::string_view text) { return fmt::format("{:016x}", fnv1a(text)); }

std::string first_line(const std::filesystem::path& record) {
  std::ifstream in(record, std::ios::binary);
  std::string line;
  std::getline(in, line);
  return line;
}

}  // namespace

MlflowProgress MlflowProgress::read(std::string_view text) {
  MlflowProgress progress;
  const auto json = parse_json_or_discard(text);
  if (!json.is_object()) return progress;
  for (const auto& [name, to] :
       {std::pair("to", &progress.to), std::pair("record", &progress.record), std::pair("intent", &progress.intent),
        std::pair("run", &progress.run), std::pair("experiment", &progress.experiment)}) {
    *to = text_in(json, name);
  }
  if (const auto found = json.find("offset"); found != json.end() && found->is_number_unsigned())
    progress.offset = *found;
  for (const auto& [name, to] : {std::pair("ended", &progress.ended), std::pair("artifacts", &progress.artifacts)}) {
    if (const auto found = json.find(name); found != json.end() && found->is_boolean()) *to = *found;
  }
  return progress;
}

std::string MlflowProgress::text() const {
  const nlohmann::ordered_json json = {{"to", to},       {"record", record},         {"intent", intent},
                                       {"run", run},     {"experiment", experiment}, {"offset", offset},
                                       {"ended", ended}, {"artifacts", artifacts}};
  return json_text(json);
}

MlflowState::MlflowState(const std::filesystem::path& record, const std::string& to)
    : file_(record.parent_path() / fmt::format("mlflow-{}.state", digest(to).substr(0, 8))) {
  fd_.reset(::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NOFOLLOW, 0600));
  if (!fd_) {
    raise(ErrorCode::Io, "opening {} failed -- {} -- how far MLflow has got is kept there, beside the record",
          file_.string(), errno_text(errno));
  }
  if (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    raise(ErrorCode::Unavailable,
          "exporting to MLflow failed -- {} -- another process is doing the same for this record", file_.string());
  }
  std::string text(kMostBytes, '\0');
  const ssize_t got = ::pread(fd_.get(), text.data(), text.size(), 0);
  text.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
  progress = MlflowProgress::read(text);
  const std::string line = digest(first_line(record));
  std::error_code unknown;
  if (progress.to != to || progress.record != line || progress.offset > std::filesystem::file_size(record, unknown)) {
    progress = {};
    progress.to = to;
    progress.record = line;
  }
}

void MlflowState::save() {
  // Writes in place, since the lock is on this file, and within a page, so that a kill cannot leave a torn write.
  std::string text = progress.text();
  if (text.size() >= kMostBytes) {
    raise(ErrorCode::InvalidArgument,
          "exporting to MLflow failed -- its address and the experiment's name are too long");
  }
  text.resize(kMostBytes - 1, ' ');
  text += '\n';
  ssize_t put = -1;
  do put = ::pwrite(fd_.get(), text.data(), text.size(), 0);
  while (put < 0 && errno == EINTR);
  if (put != static_cast<ssize_t>(text.size()))
    raise(ErrorCode::Io, "writing {} failed -- {}", file_.string(), errno_text(errno));
}

}  // namespace cohort::track
