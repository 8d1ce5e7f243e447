// Destinations for the record of a run, as --track and `cohort export --to` name them. Pure functions, but for the
// environment.
#pragma once

#include "base/env.h"
#include "net/address.h"

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace cohort::track {

/// The kind, and what stands behind its colon: "tensorboard:DIR", "csv:FILE", "prometheus:FILE",
/// "prometheus:[HOST]:PORT", "mlflow:URI", "wandb:[PROJECT][?...]", "kubeflow". Throws InvalidArgument, with those that
/// there are.
std::pair<std::string, std::string> parts_of(const std::string& destination);

/// Throws what export would throw without looking at files or servers. `token`: clients have to show one.
void check_destination(const std::string& destination, bool token);

/// "HOST:PORT" or ":PORT", which is one on loopback: a place to serve at; nullopt: a file.
std::optional<net::Address> port_of(std::string_view where);

/// Destination of an MLflow sink: the server, the experiment, the run, and the credentials.
struct MlflowPlace {
  std::string server;  ///< "https://host:5000", without a path
  std::string prefix;  ///< of paths: "/mlflow", or empty
  std::string store;  ///< without a server (MlflowStore): "sqlite:////abs/mlflow.db", or a folder, "file:///abs/mlruns"
  std::string experiment, experiment_id;
  std::string run;       ///< of somebody else, who ends it; empty: one of the sink's own
  std::string run_name;  ///< for one of its own
  // These are never shown.
  std::string token, user, password;
  std::string certificates, own_certificate;  ///< paths
  bool checks_certificate = true;
  bool databricks = false;

  std::string shown() const { return store.empty() ? server + prefix : store; }
};

/// Reads an environment variable; nullopt: it is not set, or empty.
using Lookup = std::function<std::optional<std::string>(std::string_view name)>;

/// `uri`: "http://HOST:PORT[?experiment=NAME&run=ID]", "databricks", "sqlite:///FILE", a folder ("/...", "./..." or
/// "file:..."), or empty, which is MLFLOW_TRACKING_URI; the rest is from MLflow's own variables. Throws InvalidArgument
/// for what it cannot be, with what to type instead.
MlflowPlace mlflow_place(std::string_view uri, const Lookup& variable);

/// Destination of a wandb sink. Empty fields follow wandb's own variables (WANDB_PROJECT, ...).
struct WandbPlace {
  std::string project, entity, group, name;
  std::string run;  ///< an id: goes on in it; empty: that of the record
};

/// `where`: "PROJECT[?entity=NAME&name=NAME&group=NAME&run=ID]". Throws InvalidArgument.
WandbPlace wandb_place(std::string_view where);

struct KubeflowPlace {
  std::string server;        ///< "https://service.namespace.svc:port"
  std::string path;          ///< on it
  std::string certificates;  ///< a file of those that are trusted; empty: the system's
  std::string token_file;    ///< read anew each time, since the token is replaced each hour; empty: none
};

/// As the variables KUBEFLOW_TRAINER_SERVER_* say. Throws InvalidArgument where the address is missing or none.
KubeflowPlace kubeflow_place(const env::Source& variables);

}  // namespace cohort::track
