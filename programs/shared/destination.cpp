#include "shared/destination.h"

#include "base/env.h"
#include "base/parse.h"
#include "base/result.h"
#include "net/http.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <filesystem>
#include <utility>
#include <vector>

namespace cohort::track {
namespace {

[[noreturn]] void refuse(std::string_view uri, std::string_view why) {
  raise(ErrorCode::InvalidArgument, "exporting to 'mlflow:{}' failed -- {}", uri, why);
}

std::string decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && std::isxdigit(static_cast<unsigned char>(text[i + 1])) != 0 &&
        std::isxdigit(static_cast<unsigned char>(text[i + 2])) != 0) {
      out += static_cast<char>(std::stoi(std::string(text.substr(i + 1, 2)), nullptr, 16));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

/// Reads "NAME=VALUE&..." into `place`; `known` lists the valid names.
void read_options(std::string_view destination, std::string_view options, const std::vector<std::string>& known,
                  ClientPlace& place) {
  for (const std::string& name : known) place[name];
  while (!options.empty()) {
    std::string_view value = take_until(options, "&");
    const std::string name(take_until(value, "="));
    if (std::ranges::find(known, name) == known.end() || value.empty()) {
      raise(
          ErrorCode::InvalidArgument,
          "exporting to '{}' failed -- '{}' is no option of it -- there are {}=..., behind a '?' and with '&' between "
          "them",
          destination, name, fmt::join(known, "=..., "));
    }
    place[name] = decoded(value);
  }
}

/// Returns "sqlite:////abs/mlflow.db" or "file:///abs/mlruns"; empty if `uri` is neither a SQLite database nor a
/// folder.
std::string store_of(std::string_view uri) {
  constexpr std::string_view kDatabase = "sqlite:///", kFolder = "file:";
  if (uri.starts_with(kDatabase)) {
    const std::string_view file = uri.substr(kDatabase.size());
    if (file.empty() || file.starts_with(":memory:")) return {};
    return fmt::format("{}{}", kDatabase, std::filesystem::absolute(file).string());
  }
  if (uri.starts_with(kFolder)) {
    uri.remove_prefix(kFolder.size());
    if (uri.starts_with("//") && !uri.starts_with("///")) return {};  // a file on another host
    if (uri.starts_with("///")) uri.remove_prefix(2);
  } else if (!uri.starts_with('/') && !uri.starts_with("./") && !uri.starts_with("../")) {
    return {};
  }
  return uri.empty() ? "" : "file://" + std::filesystem::absolute(uri).lexically_normal().string();
}

/// Reads "https://host:5000/path" into `place`. `shown` is the part that an error may show.
void read_server(ClientPlace& place, std::string_view server, std::string_view shown, bool may_have_password) {
  const auto scheme_end = server.find("://");
  const std::string_view scheme = server.substr(0, std::min(scheme_end, server.size()));
  if (scheme_end == std::string_view::npos || (scheme != "http" && scheme != "https")) {
    refuse(shown,
           "it is no http://HOST:5000, sqlite:///FILE or folder (./mlruns) -- over another database start a server, "
           "mlflow server --backend-store-uri URI --port 5000, and give mlflow:http://127.0.0.1:5000");
  }
  std::string_view rest = server.substr(scheme_end + 3);
  std::string_view authority = rest.substr(0, std::min(rest.find('/'), rest.size()));
  std::string_view path = rest.substr(authority.size());
  while (path.ends_with('/')) path.remove_suffix(1);
  if (const auto at = authority.rfind('@'); at != std::string_view::npos) {
    if (!may_have_password) {
      refuse("...",
             "a command line is for everyone to see: user and password belong into MLFLOW_TRACKING_USERNAME and "
             "MLFLOW_TRACKING_PASSWORD");
    }
    std::string_view who = authority.substr(0, at);
    place["user"] = decoded(take_until(who, ":"));
    place["password"] = decoded(who);
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
  place["uri"] = fmt::format("{}://{}{}", scheme, authority, path);
}

}  // namespace

ClientPlace mlflow_place(std::string_view uri, const env::Source& variables) {
  ClientPlace place = {{"user", ""}, {"password", ""}};
  std::string_view options = uri;
  std::string server(take_until(options, "?"));
  read_options(fmt::format("mlflow:{}", uri.substr(0, uri.find('?'))), options,
               {"experiment", "experiment_id", "run", "name"}, place);

  const bool from_variable = server.empty();
  if (from_variable) server = env::text("MLFLOW_TRACKING_URI", variables);
  if (server.empty()) {
    refuse(uri, "it names no server, and MLFLOW_TRACKING_URI is not set -- give mlflow:http://HOST:5000");
  }
  const std::string shown = from_variable ? "... of MLFLOW_TRACKING_URI" : server;
  const bool databricks = server == "databricks" || server.starts_with("databricks:");
  place["uri"] = databricks ? server : store_of(server);
  if (place["uri"].empty()) read_server(place, server, shown, from_variable);

  // cohort.run (Python) passes on its driver's variable under the second name.
  for (const std::string_view name : {std::string_view("MLFLOW_RUN_ID"), env::kMlflowRun}) {
    if (place["run"].empty()) place["run"] = env::text(name, variables);
  }
  if (place["experiment"].empty() && place["experiment_id"].empty()) {
    place["experiment_id"] = env::text("MLFLOW_EXPERIMENT_ID", variables);
    if (place["experiment_id"].empty()) place["experiment"] = env::text("MLFLOW_EXPERIMENT_NAME", variables);
    if (place["experiment_id"].empty() && place["experiment"].empty()) {
      if (databricks && place["run"].empty())
        refuse(shown, "Databricks has no default experiment -- add ?experiment=/Users/NAME/EXPERIMENT");
      place["experiment"] = "Default";
    }
  }
  return place;
}

ClientPlace wandb_place(std::string_view where) {
  std::string_view options = where;
  ClientPlace place = {{"project", decoded(take_until(options, "?"))}};
  read_options(fmt::format("wandb:{}", place["project"]), options, {"entity", "name", "group", "run"}, place);
  return place;
}

KubeflowPlace kubeflow_place(const env::Source& variables) {
  const std::string address = env::text(env::kKubeflowServer, variables);
  const std::size_t scheme = address.find("://");
  const std::size_t slash = scheme == std::string::npos ? scheme : address.find('/', scheme + 3);
  if (slash == std::string::npos || (!address.starts_with("https://") && !address.starts_with("http://"))) {
    raise(ErrorCode::InvalidArgument,
          "telling Kubeflow of the run failed -- {} is '{}' -- the address that its trainer sets (2.2, with the gate "
          "TrainJobStatus) is wanted: https://HOST:PORT/PATH",
          env::kKubeflowServer, address);
  }
  return {.server = address.substr(0, slash),
          .path = address.substr(slash),
          .certificates = env::text(env::kKubeflowCertificates, variables),
          .token_file = env::text(env::kKubeflowToken, variables)};
}

std::optional<net::Address> port_of(std::string_view where) {
  const std::size_t colon = where.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const auto port = parse_integer<std::uint16_t>(where.substr(colon + 1));
  if (!port) return std::nullopt;
  if (colon == 0) return net::Address{"127.0.0.1", *port};
  const auto address = net::parse_address(where);
  return address ? std::optional(*address) : std::nullopt;
}

std::pair<std::string, std::string> parts_of(const std::string& destination) {
  const std::size_t colon = destination.find(':');
  const std::string kind = destination.substr(0, colon);
  const std::string where = colon == std::string::npos ? "" : destination.substr(colon + 1);
  const bool is_file = kind == "tensorboard" || kind == "csv" || kind == "prometheus";
  if ((is_file && !where.empty()) || kind == "mlflow" || kind == "wandb" || destination == "kubeflow")
    return {kind, where};
  raise(ErrorCode::InvalidArgument,
        "exporting to '{}' failed -- it is none of tensorboard:DIR, csv:FILE, prometheus:FILE, prometheus:[HOST]:PORT, "
        "mlflow:URI, wandb:PROJECT, kubeflow",
        destination);
}

void check_destination(const std::string& destination, bool token) {
  const auto [kind, where] = parts_of(destination);
  if (kind == "mlflow") (void)mlflow_place(where, {});
  if (kind == "wandb") (void)wandb_place(where);
  if (kind == "kubeflow") (void)kubeflow_place({});
  if (kind == "prometheus") {
    const auto at = port_of(where);
    if (at && !net::is_loopback_name(at->host) && !token) {
      raise(ErrorCode::InvalidArgument,
            "'{}': whoever reaches this host could read it -- give a token (a file of one line, named by {}), or serve "
            "at :{} and "
            "reach it by `ssh -L`",
            destination, env::kMetricsTokenFile, at->port);
    }
  }
}

}  // namespace cohort::track
