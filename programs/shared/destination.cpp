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

/// Value of an environment variable for MLflow.
std::optional<std::string> variable(std::string_view name) { return env::get(name); }

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

/// "NAME=VALUE&..." into the texts of these names.
void read_options(std::string_view destination, std::string_view options,
                  const std::vector<std::pair<std::string_view, std::string*>>& known) {
  while (!options.empty()) {
    std::string_view value = take_until(options, "&");
    const std::string_view name = take_until(value, "=");
    const auto found = std::find_if(known.begin(), known.end(), [name](const auto& one) { return one.first == name; });
    if (found == known.end() || value.empty()) {
      std::string names;
      for (const auto& one : known) names += fmt::format("{}{}=...", names.empty() ? "" : ", ", one.first);
      raise(
          ErrorCode::InvalidArgument,
          "exporting to '{}' failed -- '{}' is no option of it -- there are {}, behind a '?' and with '&' between them",
          destination, name, names);
    }
    *found->second = decoded(value);
  }
}

bool truth(const Lookup& variable, std::string_view name) {
  const auto text = variable(name);
  return text && parse_truth(*text).value_or(false);
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
    if (uri.starts_with("//") && !uri.starts_with("///")) return {};  // of another host
    if (uri.starts_with("///")) uri.remove_prefix(2);
  } else if (!uri.starts_with('/') && !uri.starts_with("./") && !uri.starts_with("../")) {
    return {};
  }
  return uri.empty() ? "" : "file://" + std::filesystem::absolute(uri).lexically_normal().string();
}

/// Reads "https://host:5000/path" into `place`. `shown` is the part that an error may show.
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
    place.user = decoded(take_until(who, ":"));
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
  std::string server(take_until(options, "?"));
  read_options(fmt::format("mlflow:{}", uri.substr(0, uri.find('?'))), options,
               {{"experiment", &place.experiment},
                {"experiment_id", &place.experiment_id},
                {"run", &place.run},
                {"name", &place.run_name}});

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

  // Python's cohort.run passes its driver's variable under the second name.
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

WandbPlace wandb_place(std::string_view where) {
  WandbPlace place;
  std::string_view options = where;
  place.project = decoded(take_until(options, "?"));
  read_options(fmt::format("wandb:{}", place.project), options,
               {{"entity", &place.entity}, {"name", &place.name}, {"group", &place.group}, {"run", &place.run}});
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
  if (kind == "mlflow") (void)mlflow_place(where, variable);
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
