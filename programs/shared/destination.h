// Destinations for the record of a run, as --track and `cohort export --to` name them. Functions are pure, except that
// they read the environment.
#pragma once

#include "base/env.h"
#include "net/address.h"

#include <functional>
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

/// Destination of an MLflow sink: the server, the experiment, the run, and the credentials.
struct MlflowPlace {
  std::string server;  ///< "https://host:5000", without a path
  std::string prefix;  ///< of paths: "/mlflow", or empty
  std::string store;   ///< set if there is no server (MlflowStore): "sqlite:////abs/mlflow.db", or a folder,
                       ///< "file:///abs/mlruns"
  std::string experiment, experiment_id;
  std::string run;       ///< an existing run, which its owner ends; empty: the sink makes one
  std::string run_name;  ///< for a run that the sink makes
  // Credentials, never shown.
  std::string token, user, password;
  std::string certificates, own_certificate;  ///< paths
  bool checks_certificate = true;
  bool databricks = false;

  std::string shown() const { return store.empty() ? server + prefix : store; }
};

/// Reads an environment variable; nullopt if it is not set, or empty.
using Lookup = std::function<std::optional<std::string>(std::string_view name)>;

/// `uri`: "http://HOST:PORT[?experiment=NAME&run=ID]", "databricks", "sqlite:///FILE", a folder ("/...", "./..." or
/// "file:..."), or empty, which means MLFLOW_TRACKING_URI; other values come from MLflow's own variables. Throws
/// InvalidArgument for any other text, with a proposal.
MlflowPlace mlflow_place(std::string_view uri, const Lookup& variable);

/// Destination of a wandb sink. Empty fields follow wandb's own variables (WANDB_PROJECT, ...).
struct WandbPlace {
  std::string project, entity, group, name;
  std::string run;  ///< id of a run to continue; empty: the record's id
};

/// `where`: "PROJECT[?entity=NAME&name=NAME&group=NAME&run=ID]". Throws InvalidArgument.
WandbPlace wandb_place(std::string_view where);

struct KubeflowPlace {
  std::string server;        ///< "https://service.namespace.svc:port"
  std::string path;          ///< on the server
  std::string certificates;  ///< file of trusted certificates; empty: the system's
  std::string token_file;    ///< read for each request, since the token is replaced each hour; empty: none
};

/// Reads the variables KUBEFLOW_TRAINER_SERVER_*. Throws InvalidArgument if the address is missing or invalid.
KubeflowPlace kubeflow_place(const env::Source& variables);

}  // namespace cohort::track
