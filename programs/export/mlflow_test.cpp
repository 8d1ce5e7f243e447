// The MLflow sink against a server in this process that keeps what MLflow would keep, and has its moods.
#include "export/mlflow.h"
#include "export/export.h"
#include "export/python_child.h"

#include <cohort/error.h>

#include <fmt/format.h>

#include <gtest/gtest.h>

#include <httplib.h>
#include <nlohmann/json.hpp>

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <tuple>

namespace cohort::track {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::milliseconds;

// Anybody may have put a file there.
TEST(PythonChild, RunsNoFileOfTheWorkingFolder) {
  const fs::path folder = fs::temp_directory_path() / fmt::format("cohort-python-{}", ::getpid());
  fs::create_directory(folder);
  std::ofstream(folder / "json.py") << "raise SystemExit('theirs')\n";
  const fs::path before = fs::current_path();
  fs::current_path(folder);
  std::string said;
  {
    PythonChild child("import json\nprint(json.dumps([1]), flush=True)\n");
    said = child.line(std::chrono::seconds(60));
  }
  fs::current_path(before);
  fs::remove_all(folder);
  EXPECT_EQ(said, "[1]");
}

/// Mimics MLflow's server as far as the sink may rely on it: points are a set, parameters never change, a run is found
/// by its tags.
class FakeMlflow {
 public:
  FakeMlflow() {
    server_.set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      const std::scoped_lock lock(mutex_);
      requests.push_back(request.method + " " + request.path);
      authorization = request.get_header_value("Authorization");
      if (refuse_host) {
        response.status = 403;
        response.set_content("Invalid Host header - possible DNS rebinding attack detected", "text/plain");
        return httplib::Server::HandlerResponse::Handled;
      }
      if (!token.empty() && authorization != "Bearer " + token) return refuse(response, 401, "", "no");
      if (failures > 0 && --failures >= 0) return refuse(response, failing_status, "", "in trouble");
      return httplib::Server::HandlerResponse::Unhandled;
    });
    const std::string api = "/api/2.0/mlflow/";
    server_.Get(api + "experiments/get-by-name", [this](const auto& request, auto& response) {
      const std::scoped_lock lock(mutex_);
      const auto found = experiments.find(request.get_param_value("experiment_name"));
      if (found == experiments.end()) return (void)refuse(response, 404, "RESOURCE_DOES_NOT_EXIST", "none");
      answer(response, {{"experiment", {{"experiment_id", found->second}, {"lifecycle_stage", "active"}}}});
    });
    server_.Post(api + "experiments/create", [this](const auto& request, auto& response) {
      const std::scoped_lock lock(mutex_);
      const std::string id = std::to_string(experiments.size() + 1);
      experiments[json::parse(request.body).at("name")] = id;
      answer(response, {{"experiment_id", id}});
    });
    server_.Post(api + "runs/create", [this](const auto& request, auto& response) {
      const std::scoped_lock lock(mutex_);
      const json body = json::parse(request.body);
      const std::string id = "run" + std::to_string(runs.size());
      Run& run = runs[id];
      run.name = body.at("run_name");
      run.start = body.at("start_time");
      for (const json& tag : body.at("tags")) run.tags[tag.at("key")] = tag.at("value");
      if (std::exchange(lose_an_answer, false)) return (void)refuse(response, 502, "", "lost");
      answer(response, {{"run", {{"info", {{"run_id", id}}}}}});
    });
    server_.Post(api + "runs/search", [this](const auto& request, auto& response) {
      const std::scoped_lock lock(mutex_);
      const std::string filter = json::parse(request.body).at("filter");
      json found = json::array();
      for (const auto& [id, run] : runs) {
        for (const auto& [key, value] : run.tags) {
          if (filter == "tags.`" + key + "` = '" + value + "'") found.push_back({{"info", {{"run_id", id}}}});
        }
      }
      answer(response, {{"runs", found}});
    });
    server_.Get(api + "runs/get", [this](const auto& request, auto& response) {
      const std::scoped_lock lock(mutex_);
      const std::string id = request.get_param_value("run_id");
      if (!runs.contains(id)) return (void)refuse(response, 404, "RESOURCE_DOES_NOT_EXIST", "no such run");
      answer(response, {{"run",
                         {{"info",
                           {{"run_id", id},
                            {"experiment_id", "1"},
                            {"artifact_uri", "mlflow-artifacts:/1/" + id + "/artifacts"}}}}}});
    });
    server_.Post(api + "runs/update", [this](const auto& request, auto& response) {
      const std::scoped_lock lock(mutex_);
      const json body = json::parse(request.body);
      Run& run = runs.at(body.at("run_id"));
      run.status = body.at("status");
      run.end = body.value("end_time", std::int64_t{0});
      answer(response, json::object());
    });
    server_.Post(api + "runs/log-batch", [this](const auto& request, auto& response) {
      const std::scoped_lock lock(mutex_);
      const json body = json::parse(request.body);
      Run& run = runs.at(body.at("run_id"));
      if (body.contains("metrics") && body["metrics"].size() > 1000)
        return (void)refuse(response, 400, "INVALID_PARAMETER_VALUE", "more than 1000");
      for (const json& one : body.value("params", json::array())) {
        const auto found = run.parameters.find(one.at("key"));
        if (found != run.parameters.end() && found->second != one.at("value"))
          return (void)refuse(response, 400, "INVALID_PARAMETER_VALUE", "Changing param values is not allowed");
      }
      for (const json& one : body.value("params", json::array())) run.parameters[one.at("key")] = one.at("value");
      for (const json& one : body.value("tags", json::array())) run.tags[one.at("key")] = one.at("value");
      for (const json& one : body.value("metrics", json::array())) {
        ++points_received;
        run.points.emplace(one.at("key"), one.at("step"), one.at("timestamp"), one.at("value").dump());
      }
      if (on_batch) on_batch();
      if (std::exchange(lose_a_batch_answer, false)) return (void)refuse(response, 502, "", "lost");
      answer(response, json::object());
    });
    server_.Put(R"(/api/2.0/mlflow-artifacts/artifacts/(.*))", [this](const auto& request, auto& response) {
      const std::scoped_lock lock(mutex_);
      if (artifact_status != 200) return (void)refuse(response, artifact_status, "", "no room");
      artifacts[request.matches[1]] = request.body;
      answer(response, json::object());
    });
    start();
  }
  ~FakeMlflow() { stop(); }

  /// At the same port again, after `stop`.
  void start() {
    port_ = port_ == 0 ? server_.bind_to_any_port("127.0.0.1") : (server_.bind_to_port("127.0.0.1", port_) ? port_ : 0);
    ASSERT_GT(port_, 0);
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::yield();
  }
  void stop() {
    if (!thread_.joinable()) return;
    server_.stop();
    thread_.join();
  }
  std::string uri() const { return "mlflow:http://127.0.0.1:" + std::to_string(port_); }

  struct Run {
    std::string name, status = "RUNNING";
    std::int64_t start = 0, end = 0;
    std::map<std::string, std::string> parameters, tags;
    std::set<std::tuple<std::string, std::int64_t, std::int64_t, std::string>> points;
  };
  std::map<std::string, std::string> experiments;
  std::map<std::string, Run> runs;
  std::map<std::string, std::string> artifacts;
  std::vector<std::string> requests;
  std::string authorization, token;
  std::function<void()> on_batch;
  int failures = 0, failing_status = 500, points_received = 0, artifact_status = 200;
  bool refuse_host = false, lose_an_answer = false, lose_a_batch_answer = false;

 private:
  static void answer(httplib::Response& response, const json& body) {
    response.set_content(body.dump(), "application/json");
  }
  static httplib::Server::HandlerResponse refuse(httplib::Response& response, int status, const std::string& code,
                                                 const std::string& message) {
    response.status = status;
    answer(response, {{"error_code", code}, {"message", message}});
    return httplib::Server::HandlerResponse::Handled;
  }

  httplib::Server server_;
  int port_ = 0;
  std::thread thread_;
  std::mutex mutex_;
};

class MlflowSinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME",
                             "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"})
      ::unsetenv(name);
    std::string name = (fs::temp_directory_path() / "cohort-mlflow-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    file_ = folder_ / "run.jsonl";
  }
  void TearDown() override { fs::remove_all(folder_); }

  void append(std::string_view text) { std::ofstream(file_, std::ios::app | std::ios::binary) << text; }
  void append_start(double rate) {
    append(R"({"event":"start","time":1000.5,"schema":1,"program":"digits","world_size":2,"host":"h","job":"digits-1",)"
           R"("parameters":{"lr":)" +
           std::to_string(rate) + R"(,"seed":1}})" + "\n");
  }
  void append_steps(int first, int last) {
    std::string text;
    for (int step = first; step <= last; ++step) {
      text += fmt::format(R"({{"event":"metric","time":{}.25,"step":{},"values":{{"loss":{}}}}})", 1000 + step, step,
                          step * 0.5) +
              "\n";
    }
    append(text);
  }
  ExportSummary export_to(const std::string& destination, std::function<bool(milliseconds)> follow = {}) {
    SinkOptions options;
    options.record = file_;
    options.say = [this](const std::string& text) { said += text + "\n"; };
    options.wait = follow ? follow : [this](milliseconds time) {
      if (on_wait) on_wait();
      std::this_thread::sleep_for(std::min(time, milliseconds(5)));
      return false;
    };
    options.patience = patience;
    const auto sink = make_sink(destination, options);
    return export_record({.record = file_, .sink = sink.get(), .wait = follow});
  }
  std::string failure(const std::string& destination) {
    try {
      export_to(destination);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  FakeMlflow server_;
  fs::path folder_, file_;
  std::string said;
  std::function<void()> on_wait;
  milliseconds patience = std::chrono::seconds(30);
};

TEST_F(MlflowSinkTest, ARecordIsARun) {
  append_start(0.5);
  append_steps(1, 2500);
  append(R"({"event":"metric","time":9.5,"step":7,"values":{"a b!/../ms":"NaN","inf":"-Infinity"},"rank":3})"
         "\n");
  append(R"({"event":"end","time":5000,"step":2500,"epoch":1})"
         "\n");
  export_to(server_.uri() + "?experiment=first%20one&name=mine");
  ASSERT_EQ(server_.runs.size(), 1U);
  EXPECT_EQ(server_.experiments.at("first one"), "1");
  const auto& run = server_.runs.at("run0");
  EXPECT_EQ(run.name, "mine");
  EXPECT_EQ(run.start, 1000500);
  EXPECT_EQ(run.status, "FINISHED");
  EXPECT_EQ(run.end, 5000000);
  EXPECT_EQ(run.parameters.at("lr"), "0.5");
  EXPECT_EQ(run.tags.at("cohort.program"), "digits");
  EXPECT_EQ(run.points.size(), 2502U);
  EXPECT_TRUE(run.points.contains({"loss", 2500, 3500250, "1250"})) << json(*run.points.begin());
  EXPECT_TRUE(run.points.contains({"a b_/__/ms/rank3", 7, 9500, "\"NaN\""}));
  EXPECT_TRUE(run.points.contains({"inf/rank3", 7, 9500, "\"-Infinity\""}));
  std::ifstream record(file_);
  EXPECT_EQ(server_.artifacts.at("1/run0/artifacts/run.jsonl"),
            std::string(std::istreambuf_iterator<char>(record), {}));
  EXPECT_TRUE(server_.artifacts.at("1/run0/artifacts/curves.svg").starts_with("<svg"));
  EXPECT_NE(said.find("#/experiments/1/runs/run0"), std::string::npos) << said;

  // Again: there is nothing to do.
  const int before = server_.points_received;
  export_to(server_.uri() + "?experiment=first%20one&name=mine");
  EXPECT_EQ(server_.runs.size(), 1U);
  EXPECT_EQ(server_.points_received, before);
}

TEST_F(MlflowSinkTest, ServerInTroubleOrAwayLosesNoPointAndStoresNoneTwice) {
  append_start(0.5);
  append_steps(1, 3500);
  server_.lose_an_answer = true;  // a run was made, and nobody knows
  int batches = 0, waits = 0;
  server_.on_batch = [&] {
    ++batches;                                             // of tags, of parameters, of points
    if (batches == 3) server_.lose_a_batch_answer = true;  // it was stored, and nobody knows
    if (batches == 5) server_.failures = 3;
  };
  on_wait = [&] {
    if (++waits == 5) server_.stop();
    if (waits == 8) server_.start();
  };
  server_.failing_status = 503;
  export_to(server_.uri());
  EXPECT_GE(waits, 5);
  EXPECT_EQ(server_.runs.size(), 1U);
  EXPECT_EQ(server_.runs.at("run0").points.size(), 3500U);
  EXPECT_GT(server_.points_received, 3500);
  EXPECT_NE(said.find("trying on"), std::string::npos) << said;
  EXPECT_NE(said.find("answers again"), std::string::npos) << said;
}

TEST_F(MlflowSinkTest, AnEndedSinkGoesOnWhereItWas) {
  append_start(0.5);
  append_steps(1, 2500);
  // Stopped after the second batch, as a kill would: what follows is known to nobody.
  server_.on_batch = [this] {
    if (server_.points_received == 2000) server_.failures = 1000000;
  };
  patience = milliseconds(100);
  EXPECT_NE(failure(server_.uri()).find("in trouble"), std::string::npos);
  server_.failures = 0;
  server_.on_batch = {};
  const int before = server_.points_received;
  append_steps(2501, 2600);
  export_to(server_.uri());
  EXPECT_EQ(server_.runs.size(), 1U);
  EXPECT_EQ(server_.runs.at("run0").points.size(), 2600U);
  EXPECT_EQ(server_.points_received - before, 600);
}

TEST_F(MlflowSinkTest, AMadeRunIsFoundByWhoeverWasKilledBeforeItKnew) {
  append_start(0.5);
  server_.lose_an_answer = true;
  patience = milliseconds(0);
  EXPECT_NE(failure(server_.uri()).find("lost"), std::string::npos);
  patience = std::chrono::seconds(10);
  export_to(server_.uri());
  EXPECT_EQ(server_.runs.size(), 1U);
}

TEST_F(MlflowSinkTest, ChangedParametersOfAResumedRunAreTags) {
  append_start(0.5);
  append_steps(1, 3);
  append_start(0.25);
  append(R"({"event":"resume","time":1100,"step":2})"
         "\n");
  append_steps(3, 4);
  EXPECT_TRUE(export_to(server_.uri()).without_end);
  const auto& run = server_.runs.at("run0");
  EXPECT_EQ(run.parameters.at("lr"), "0.5");
  EXPECT_EQ(run.tags.at("resume.1.lr"), "0.25");
  EXPECT_FALSE(run.tags.contains("resume.1.seed"));
  EXPECT_EQ(run.status, "KILLED");  // without an end
  EXPECT_EQ(run.points.size(), 4U);
}

TEST_F(MlflowSinkTest, ARunOfSomebodyElseIsWrittenIntoAndNotEnded) {
  server_.experiments["x"] = "1";
  server_.runs["theirs"].parameters["lr"] = "7";
  append_start(0.5);
  append_steps(1, 5);
  append(R"({"event":"end","time":5000,"step":5})"
         "\n");
  export_to(server_.uri() + "?run=theirs");
  ASSERT_EQ(server_.runs.size(), 1U);
  const auto& run = server_.runs.at("theirs");
  EXPECT_EQ(run.status, "RUNNING");
  EXPECT_EQ(run.points.size(), 5U);
  EXPECT_EQ(run.parameters.at("lr"), "7");
  EXPECT_EQ(run.tags.at("cohort.parameter.lr"), "0.5");
  EXPECT_EQ(run.parameters.at("seed"), "1");
  EXPECT_NE(failure(server_.uri() + "?run=nobody's").find("no such run"), std::string::npos);
}

TEST_F(MlflowSinkTest, TheStateIsTheJobs) {
  append_start(0.5);
  for (const auto& [status, state] : {std::pair(3, "FAILED"), std::pair(137, "KILLED"), std::pair(0, "FINISHED")}) {
    std::ofstream(folder_ / "job.json") << fmt::format(R"({{"end":"x","exit_status":{}}})", status);
    append_steps(status + 1, status + 1);  // it goes on each time
    export_to(server_.uri(), [](milliseconds) { return false; });
    EXPECT_EQ(server_.runs.at("run0").status, state);
  }
  EXPECT_EQ(server_.runs.size(), 1U);
}

TEST_F(MlflowSinkTest, ARunWhoseArtifactsAreRefusedHasItsState) {
  append_start(0.5);
  append_steps(1, 3);
  append(R"({"event":"validation","time":4000,"step":3,"accuracy":0.5})"
         "\n");
  append(R"({"event":"end","time":5000,"step":3})"
         "\n");
  for (const int status : {500, 403, 400}) {
    server_.artifact_status = status;
    server_.runs.clear();
    for (const auto& entry : fs::directory_iterator(folder_))
      if (entry.path() != file_) fs::remove(entry.path());
    said.clear();
    const ExportSummary summary = export_to(server_.uri());
    EXPECT_EQ(server_.runs.at("run0").status, "FINISHED") << status;
    EXPECT_NE(said.find("MLflow does not take run.jsonl as an artifact"), std::string::npos) << said;
    EXPECT_EQ(summary.unknown, (std::map<std::string, std::uint64_t>{{"validation", 1}}));
    EXPECT_FALSE(summary.without_end);
  }
  server_.artifact_status = 200;  // another export sends them
  export_to(server_.uri());
  EXPECT_EQ(server_.artifacts.size(), 2U);
  EXPECT_EQ(server_.runs.size(), 1U);
}

TEST_F(MlflowSinkTest, WhoIsStoppedWhileTheServerIsAwayEndsAtOnce) {
  append_start(0.5);
  server_.stop();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(export_to(server_.uri(), [](milliseconds) { return true; }), Error);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  server_.start();
}

TEST_F(MlflowSinkTest, TwoAtTheSameTimeAreRefused) {
  append_start(0.5);
  const MlflowState first(file_, "there");
  EXPECT_THROW(MlflowState(file_, "there"), Error);
  const MlflowState other(file_, "elsewhere");
}

TEST_F(MlflowSinkTest, AnotherRecordInItsPlaceIsAnotherRun) {
  append_start(0.5);
  append_steps(1, 3);
  export_to(server_.uri());
  fs::remove(file_);
  append_start(0.125);
  append_steps(1, 3);
  export_to(server_.uri());
  EXPECT_EQ(server_.runs.size(), 2U);
}

TEST_F(MlflowSinkTest, WhoLetsNobodyInIsTold) {
  append_start(0.5);
  server_.refuse_host = true;
  const std::string host = failure(server_.uri());
  EXPECT_NE(host.find("--allowed-hosts"), std::string::npos) << host;
  server_.refuse_host = false;
  server_.token = "abc";
  EXPECT_NE(failure(server_.uri()).find("MLFLOW_TRACKING_TOKEN"), std::string::npos);
  ::setenv("MLFLOW_TRACKING_TOKEN", "wrong-one", 1);
  const std::string wrong = failure(server_.uri());
  EXPECT_NE(wrong.find("401"), std::string::npos) << wrong;
  EXPECT_EQ(wrong.find("wrong-one"), std::string::npos) << wrong;
  ::setenv("MLFLOW_TRACKING_TOKEN", "abc", 1);
  EXPECT_EQ(failure(server_.uri()), "");
  for (const auto& entry : fs::directory_iterator(folder_)) {
    std::ifstream in(entry.path());
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}).find("\"abc\""), std::string::npos) << entry.path();
  }
  ::unsetenv("MLFLOW_TRACKING_TOKEN");
  server_.token.clear();
  ::setenv("MLFLOW_TRACKING_USERNAME", "u", 1);
  ::setenv("MLFLOW_TRACKING_PASSWORD", "p", 1);
  EXPECT_EQ(failure(server_.uri()), "");
  EXPECT_EQ(server_.authorization, "Basic dTpw");
}

/// A certificate for 127.0.0.1 that only its own file vouches for.
struct Certificate {
  Certificate() {
    X509_set_version(certificate.get(), 2);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), 1);
    X509_gmtime_adj(X509_getm_notBefore(certificate.get()), -60);
    X509_gmtime_adj(X509_getm_notAfter(certificate.get()), 3600);
    X509_set_pubkey(certificate.get(), key.get());
    X509_NAME* const name = X509_get_subject_name(certificate.get());
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("127.0.0.1"), -1, -1,
                               0);
    X509_set_issuer_name(certificate.get(), name);
    X509_EXTENSION* const address = X509V3_EXT_conf_nid(nullptr, nullptr, NID_subject_alt_name, "IP:127.0.0.1");
    X509_add_ext(certificate.get(), address, -1);
    X509_EXTENSION_free(address);
    X509_sign(certificate.get(), key.get(), EVP_sha256());
  }
  void write(const fs::path& path) const {
    std::FILE* const file = std::fopen(path.c_str(), "w");
    ASSERT_NE(file, nullptr);
    PEM_write_X509(file, certificate.get());
    std::fclose(file);
  }
  std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> key{EVP_PKEY_Q_keygen(nullptr, nullptr, "EC", "P-256"), EVP_PKEY_free};
  std::unique_ptr<X509, void (*)(X509*)> certificate{X509_new(), X509_free};
};

TEST_F(MlflowSinkTest, CertificatesAreChecked) {
  const Certificate certificate;
  httplib::SSLServer server(certificate.certificate.get(), certificate.key.get());
  std::atomic<int> asked = 0;
  server.Get("/api/2.0/mlflow/experiments/get-by-name", [&asked](const auto&, auto& response) {
    ++asked;
    response.set_content(R"({"experiment":{"experiment_id":"1"}})", "application/json");
  });
  const int port = server.bind_to_any_port("127.0.0.1");
  std::thread thread([&server] { server.listen_after_bind(); });
  while (!server.is_running()) std::this_thread::yield();
  const std::string uri = "mlflow:https://127.0.0.1:" + std::to_string(port);
  append_start(0.5);
  const auto opens = [&] {
    SinkOptions options;
    options.record = file_;
    options.patience = milliseconds(0);
    try {
      (void)make_sink(uri, options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  ::setenv("MLFLOW_TRACKING_TOKEN", "for the right one alone", 1);
  EXPECT_NE(opens().find("MLFLOW_TRACKING_SERVER_CERT_PATH"), std::string::npos) << opens();
  EXPECT_EQ(asked, 0);
  certificate.write(folder_ / "trusted.pem");
  ::setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", (folder_ / "trusted.pem").c_str(), 1);
  EXPECT_EQ(opens(), "");
  ::unsetenv("MLFLOW_TRACKING_SERVER_CERT_PATH");
  ::setenv("MLFLOW_TRACKING_INSECURE_TLS", "true", 1);
  EXPECT_EQ(opens(), "");
  ::unsetenv("MLFLOW_TRACKING_INSECURE_TLS");
  EXPECT_EQ(asked, 2);
  server.stop();
  thread.join();
}

// Python's mlflow is not needed here: what there is of it lies in the folder. `python.mlflow_sink` has the real one.
class MlflowStoreTest : public MlflowSinkTest {
 protected:
  void SetUp() override {
    MlflowSinkTest::SetUp();
    const char* const before = std::getenv("PYTHONPATH");
    before_ = before != nullptr ? std::optional<std::string>(before) : std::nullopt;
    ::setenv("PYTHONPATH", folder_.c_str(), 1);
  }
  void TearDown() override {
    before_ ? ::setenv("PYTHONPATH", before_->c_str(), 1) : ::unsetenv("PYTHONPATH");
    MlflowSinkTest::TearDown();
  }
  void write(const std::string& name, std::string_view text) {
    fs::create_directories(folder_ / "mlflow");
    std::ofstream(folder_ / "mlflow" / name) << text;
  }
  std::optional<std::string> before_;
};

TEST_F(MlflowStoreTest, AnswersThisProcessAloneAndItsEndIsNoticed) {
  write("__init__.py", R"(
import os
from types import SimpleNamespace
from mlflow.exceptions import MlflowException
class MlflowClient:
    def __init__(self, uri): assert uri == "sqlite:////x/m.db"
    def search_experiments(self, max_results): return []
    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="7", lifecycle_stage="active") if name == "a b" else None
    def get_run(self, run): raise MlflowException()
    def get_experiment(self, experiment): os._exit(1)
    def update_run(self, run, status): raise ValueError(run + status)
)");
  write("entities.py", "Metric = Param = RunTag = None");
  write("exceptions.py", R"(
class MlflowException(Exception):
    def get_http_status_code(self): return 400
    def serialize_as_json(self): return '{"error_code": "BAD", "message": "run"}'
)");
  const MlflowStore store("sqlite:////x/m.db");
  httplib::Client client(store.server());
  const std::string api = "/api/2.0/mlflow/";
  EXPECT_EQ(client.Get(api + "experiments/get-by-name?experiment_name=a%20b")->status, 401);
  client.set_bearer_token_auth("another");
  EXPECT_EQ(client.Get(api + "experiments/get-by-name?experiment_name=a%20b")->status, 401);
  client.set_bearer_token_auth(store.token());
  const auto found = client.Get(api + "experiments/get-by-name?experiment_name=a%20b");
  EXPECT_EQ(found->status, 200);
  EXPECT_EQ(json::parse(found->body)["experiment"]["experiment_id"], "7");
  EXPECT_EQ(client.Get(api + "experiments/get-by-name?experiment_name=ab")->status, 404);
  const auto refused = client.Get(api + "runs/get?run_id=x");
  EXPECT_EQ(refused->status, 400);
  EXPECT_EQ(json::parse(refused->body)["error_code"], "BAD");
  const auto trouble = client.Post(api + "runs/update", R"({"run_id":"r","status":"s"})", "application/json");
  EXPECT_EQ(trouble->status, 500);
  EXPECT_EQ(json::parse(trouble->body)["message"], "ValueError: rs");

  MlflowServerOptions options;
  options.place.store = "sqlite:////x/m.db";
  options.wait = [](milliseconds) {
    std::this_thread::sleep_for(milliseconds(5));
    return false;
  };
  options.say = [](const std::string&) {};
  options.patience = std::chrono::minutes(15);
  MlflowServer server(options);
  EXPECT_EQ(server.get("mlflow/experiments/get-by-name?experiment_name=ab").status, 404);
  EXPECT_FALSE(store.has_ended());
  const auto error_of = [](const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      return std::string(to_string(error.code())) + " " + error.what();
    }
    return std::string();
  };
  const std::string ended = error_of([&] { server.get("mlflow/experiments/get?experiment_id=1"); });
  EXPECT_EQ(ended,
            "Unavailable talking to MLflow failed -- sqlite:////x/m.db -- the process that had opened it has ended -- "
            "export again: it goes on");
  write("__init__.py", "raise ImportError('none of\\nthis')");
  const std::string none = error_of([] { const MlflowStore never("sqlite:////x/m.db"); });
  EXPECT_NE(none.find("Unavailable opening MLflow's store sqlite:////x/m.db failed -- ImportError: none of this -- "),
            std::string::npos)
      << none;
  EXPECT_NE(none.find("pip install mlflow"), std::string::npos) << none;
}

TEST(MlflowPlace, IsReadAndRefused) {
  std::map<std::string, std::string, std::less<>> variables;
  const auto place = [&variables](std::string_view uri) {
    return mlflow_place(uri, [&variables](std::string_view name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
  };
  const auto refusal = [&place](std::string_view uri) {
    try {
      (void)place(uri);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(place("http://h:5000").experiment, "Default");
  EXPECT_EQ(place("https://[::1]:5000/a/b/?experiment_id=7").shown(), "https://[::1]:5000/a/b");
  EXPECT_EQ(place("http://h?experiment=a%2Fb%26c&run=r").experiment, "a/b&c");
  const std::string here = std::filesystem::current_path().string();
  EXPECT_EQ(place("sqlite:///m.db?experiment=x").shown(), "sqlite:///" + here + "/m.db");
  EXPECT_EQ(place("sqlite:////abs/m.db").shown(), "sqlite:////abs/m.db");
  for (const char* folder : {"file:./runs", "file:runs", "./runs", "../x"}) EXPECT_EQ(place(folder).server, "");
  EXPECT_EQ(place("./runs").shown(), "file://" + here + "/runs");
  EXPECT_EQ(place("file:///abs/runs").shown(), "file:///abs/runs");
  for (const char* wrong : {"postgresql://h/runs", "runs", "sqlite:///", "sqlite:///:memory:", "file://host/runs"})
    EXPECT_NE(refusal(wrong).find("mlflow server --backend-store-uri"), std::string::npos) << wrong;
  EXPECT_NE(refusal("http://u:secret@h:5000").find("MLFLOW_TRACKING_PASSWORD"), std::string::npos);
  EXPECT_EQ(refusal("http://u:secret@h:5000").find("secret"), std::string::npos);
  for (const char* wrong : {"http://", "http://h:0", "http://h:x", "http://a b", "http://h?x=1", "http://h?run="})
    EXPECT_NE(refusal(wrong), "") << wrong;
  EXPECT_NE(refusal("").find("MLFLOW_TRACKING_URI"), std::string::npos);
  EXPECT_NE(refusal("databricks").find("DATABRICKS_HOST"), std::string::npos);

  variables = {{"MLFLOW_TRACKING_URI", "http://u:s%40@h:5000"}, {"COHORT_MLFLOW_RUN", "drivers"}};
  EXPECT_EQ(place("").password, "s@");
  EXPECT_EQ(place("").shown(), "http://h:5000");
  EXPECT_EQ(place("?experiment=e").run, "drivers");
  variables = {
      {"DATABRICKS_HOST", "https://dbc.example"}, {"DATABRICKS_TOKEN", "t"}, {"MLFLOW_TRACKING_INSECURE_TLS", "true"}};
  EXPECT_NE(refusal("databricks").find("experiment=/Users"), std::string::npos);
  EXPECT_EQ(place("databricks?experiment=/Users/me/x").server, "https://dbc.example");
  EXPECT_FALSE(place("databricks?experiment=/x").checks_certificate);
}

}  // namespace
}  // namespace cohort::track
