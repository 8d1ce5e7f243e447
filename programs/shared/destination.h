// Destinations for the record of a run, as named with --track and `cohort export --to`. Functions are pure, except that
// they read the environment.
#pragma once

#include "base/env.h"
#include "net/address.h"

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace cohort::track {

/// Splits a destination into its kind and the text behind the colon: "tensorboard:DIR", "csv:FILE", "prometheus:FILE",
/// "prometheus:[HOST]:PORT", "mlflow:URI", "wandb:[PROJECT][?...]", "kubeflow". Throws InvalidArgument, naming the
/// kinds.
std::pair<std::string, std::string> parts_of(const std::string& destination);

/// Throws the errors of export that need no access to files or servers. `token`: clients have to present one.
void check_destination(const std::string& destination, bool token);

/// Parses "HOST:PORT" or ":PORT" (on loopback), an address to serve at; nullopt for a file.
std::optional<net::Address> port_of(std::string_view where);

/// Destination of a sink that a Python client writes (client_run.py): texts by name; empty ones follow the client's own
/// variables.
using ClientPlace = std::map<std::string, std::string>;

/// `uri`: "http://HOST:PORT[?experiment=NAME&run=ID]", "databricks", "sqlite:///FILE", a folder ("/...", "./..." or
/// "file:..."), or empty, which means MLFLOW_TRACKING_URI; other values come from MLflow's own variables. Throws
/// InvalidArgument for any other text, with a proposal. The place: "uri" (with absolute paths, without a password),
/// "user", "password", "experiment", "experiment_id", "run" (an existing one, which its owner ends), "name".
ClientPlace mlflow_place(std::string_view uri, const env::Source& variables);

/// `where`: "PROJECT[?entity=NAME&name=NAME&group=NAME&run=ID]". Throws InvalidArgument. The place: "project" and
/// these.
ClientPlace wandb_place(std::string_view where);

struct KubeflowPlace {
  std::string server;        ///< "https://service.namespace.svc:port"
  std::string path;          ///< on the server
  std::string certificates;  ///< file of trusted certificates; empty: the system's
  std::string token_file;    ///< read for each request, since the token is replaced each hour; empty: none
};

/// Reads the variables KUBEFLOW_TRAINER_SERVER_*. Throws InvalidArgument if the address is missing or invalid.
KubeflowPlace kubeflow_place(const env::Source& variables);

}  // namespace cohort::track
