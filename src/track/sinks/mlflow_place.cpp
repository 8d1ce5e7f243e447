#include "track/sinks/mlflow_place.h"

#include "base/env.h"
#include "base/json.h"
#include "base/parse.h"
#include "base/result.h"
#include "net/http.h"

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <utility>

namespace cohort::track {
namespace {

constexpr std::size_t kLongestKey = 250;

[[noreturn]] void refuse(std::string_view uri, std::string_view why) {
  raise(ErrorCode::InvalidArgument, "exporting to 'mlflow:{}' failed -- {}", uri, why);
}

/// What is no escape stands for itself.
std::string decoded(std::string_view text) { return net::percent_decoded(text).value_or(std::string(text)); }

void read_options(MlflowPlace& place, std::string_view uri, std::string_view options) {
  while (!options.empty()) {
    std::string_view value = net::take_until(options, "&");
    const std::string_view name = net::take_until(value, "=");
    std::string* const to = name == "experiment"      ? &place.experiment
                            : name == "experiment_id" ? &place.experiment_id
                            : name == "run"           ? &place.run
                            : name == "name"          ? &place.run_name
                                                      : nullptr;
    if (to == nullptr || value.empty()) {
      refuse(uri, fmt::format("'{}' is no option of it -- there are experiment=NAME, experiment_id=ID, run=ID and "
                              "name=NAME, behind a '?' and with '&' between them",
                              name));
    }
    *to = decoded(value);
  }
}

bool truth(const Lookup& variable, std::string_view name) {
  const auto text = variable(name);
  return text && parse_truth(*text).value_or(false);
}

/// "sqlite:////abs/mlflow.db", "file:///abs/mlruns"; nothing for what is no database of SQLite and no folder.
std::string store_of(std::string_view uri) {
  constexpr std::string_view kDatabase = "sqlite:///", kFolder = "file:";
  if (uri.starts_with(kDatabase)) {
    const std::string_view file = uri.substr(kDatabase.size());
    if (file.empty() || file.starts_with(":memory:")) return {};
    return fmt::format("{}{}", kDatabase, std::filesystem::absolute(file).string());
  }
  if (uri.starts_with(kFolder)) {
    uri.remove_prefix(kFolder.size());
    if (uri.starts_with("//") && !uri.starts_with("///")) return {};  // of another host
    if (uri.starts_with("///")) uri.remove_prefix(2);
  } else if (!uri.starts_with('/') && !uri.starts_with("./") && !uri.starts_with("../")) {
    return {};
  }
  return uri.empty() ? "" : "file://" + std::filesystem::absolute(uri).lexically_normal().string();
}

/// Of "https://host:5000/path". `shown` is what an error may show of it.
void read_server(MlflowPlace& place, std::string_view server, std::string_view shown, bool may_have_password) {
  const auto scheme_end = server.find("://");
  const std::string scheme(server.substr(0, std::min(scheme_end, server.size())));
  if (scheme_end == std::string_view::npos || (scheme != "http" && scheme != "https")) {
    refuse(shown,
           "it is no http://HOST:5000, sqlite:///FILE or folder (./mlruns) -- over another database start a server, "
           "mlflow server --backend-store-uri URI --port 5000, and give mlflow:http://127.0.0.1:5000");
  }
  std::string_view rest = server.substr(scheme_end + 3);
  std::string_view authority = rest.substr(0, std::min(rest.find('/'), rest.size()));
  place.prefix = rest.substr(authority.size());
  while (place.prefix.ends_with('/')) place.prefix.pop_back();
  if (const auto at = authority.rfind('@'); at != std::string_view::npos) {
    if (!may_have_password) {
      refuse("...",
             "a command line is for everyone to see: user and password belong into MLFLOW_TRACKING_USERNAME and "
             "MLFLOW_TRACKING_PASSWORD");
    }
    std::string_view who = authority.substr(0, at);
    place.user = decoded(net::take_until(who, ":"));
    place.password = decoded(who);
    authority.remove_prefix(at + 1);
  }
  const auto colon = authority.ends_with(']') ? std::string_view::npos : authority.rfind(':');
  const std::string_view host = authority.substr(0, std::min(colon, authority.size()));
  const bool host_good = !host.empty() && std::none_of(host.begin(), host.end(), [](char c) {
    return std::isspace(static_cast<unsigned char>(c)) != 0 || std::iscntrl(static_cast<unsigned char>(c)) != 0;
  });
  const auto port = colon == std::string_view::npos ? std::optional<std::uint16_t>(0)
                                                    : parse_integer<std::uint16_t>(authority.substr(colon + 1));
  if (!host_good || !port || (colon != std::string_view::npos && *port == 0) ||
      (host.find(':') != std::string_view::npos && !host.starts_with('['))) {
    refuse(shown, "a host, and a port from 1 to 65535, are wanted: mlflow:http://HOST:5000");
  }
  place.server = fmt::format("{}://{}", scheme, authority);
}

}  // namespace

MlflowPlace mlflow_place(std::string_view uri, const Lookup& variable) {
  MlflowPlace place;
  std::string_view options = uri;
  std::string server(net::take_until(options, "?"));
  read_options(place, uri.substr(0, uri.find('?')), options);

  const bool from_variable = server.empty();
  if (from_variable) server = variable("MLFLOW_TRACKING_URI").value_or("");
  if (server.empty()) {
    refuse(uri, "it names no server, and MLFLOW_TRACKING_URI is not set -- give mlflow:http://HOST:5000");
  }
  const std::string shown = from_variable ? "... of MLFLOW_TRACKING_URI" : server;
  place.token = variable("MLFLOW_TRACKING_TOKEN").value_or("");
  if (server == "databricks" || server.starts_with("databricks:")) {
    place.databricks = true;
    server = variable("DATABRICKS_HOST").value_or("");
    place.token = variable("DATABRICKS_TOKEN").value_or("");
    if (server.empty() || place.token.empty()) {
      refuse(shown, "DATABRICKS_HOST and DATABRICKS_TOKEN are wanted in the environment; profiles are not read");
    }
    if (server.find("://") == std::string::npos) server.insert(0, "https://");
  }
  place.store = store_of(server);
  if (place.store.empty()) read_server(place, server, shown, from_variable);
  if (const auto user = variable("MLFLOW_TRACKING_USERNAME")) {
    place.user = *user;
    place.password = variable("MLFLOW_TRACKING_PASSWORD").value_or("");
  }
  place.checks_certificate = !truth(variable, "MLFLOW_TRACKING_INSECURE_TLS");
  place.certificates = variable("MLFLOW_TRACKING_SERVER_CERT_PATH").value_or("");
  place.own_certificate = variable("MLFLOW_TRACKING_CLIENT_CERT_PATH").value_or("");

  // The second is what Python's cohort.run hands on of its driver's.
  for (const std::string_view name : {std::string_view("MLFLOW_RUN_ID"), env::kMlflowRun}) {
    if (place.run.empty()) place.run = variable(name).value_or("");
  }
  if (place.experiment.empty() && place.experiment_id.empty()) {
    place.experiment_id = variable("MLFLOW_EXPERIMENT_ID").value_or("");
    if (place.experiment_id.empty()) place.experiment = variable("MLFLOW_EXPERIMENT_NAME").value_or("");
    if (place.experiment_id.empty() && place.experiment.empty()) {
      if (place.databricks && place.run.empty()) {
        refuse(shown, "Databricks has no default experiment -- add ?experiment=/Users/NAME/EXPERIMENT");
      }
      place.experiment = "Default";
    }
  }
  return place;
}

std::string mlflow_key(std::string_view name) {
  std::string key;
  // A path as it would be written plainly: no empty parts, none that are dots alone.
  while (!name.empty()) {
    const std::string_view part = net::take_until(name, "/");
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
  if (key.size() > kLongestKey) {
    std::size_t end = kLongestKey;
    while (end > 0 && (static_cast<unsigned char>(key[end]) & 0xc0) == 0x80) --end;  // within a character
    key.resize(end);
    while (key.ends_with('/')) key.pop_back();
  }
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
    if (const auto found = json.find(name); found != json.end() && found->is_string()) *to = *found;
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
  // In place, since the lock is this file's; within a page, so that a kill tears nothing.
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
