// Real processes meet, or learn why they cannot.
#include "child.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/served_store.h"
#include "net/socket.h"
#include "net/store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::test {
namespace {

using std::chrono::seconds;
using Environment = std::map<std::string, std::string>;

// A folder that others may enter, gone at the end.
struct Folder {
  std::filesystem::path path;
  Folder() {
    std::string pattern = ::testing::TempDir() + "cohort-init-XXXXXX";
    path = ::mkdtemp(pattern.data());
    ::chmod(path.c_str(), 0755);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file(const std::string& name) const { return (path / name).string(); }
};

// A TCP port that nobody listens at. (It could be taken before it is used; nothing on a test machine does so in
// practice.)
std::uint16_t free_port() {
  const auto listener = value_or_throw(net::listen_on(net::any_loopback_port()));
  return value_or_throw(net::local_endpoint(listener.get())).tcp.port;
}

std::string tcp_place() { return fmt::format("tcp://127.0.0.1:{}", free_port()); }

Child worker(std::vector<std::string> arguments, Environment environment = {}, std::optional<uid_t> uid = {}) {
  arguments.insert(arguments.begin(), COHORT_INIT_WORKER);
  return Child({std::move(arguments), std::move(environment), uid});
}

std::vector<std::string> as_rank(const std::string& init, int rank, int size, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"init=" + init, fmt::format("rank={}", rank), fmt::format("size={}", size)};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::string new_secret(const Folder& folder, const std::string& name = "secret") {
  value_or_throw(net::write_new_secret_file(folder.file(name)));
  return folder.file(name);
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "in: " << (text)

void expect_all_formed(std::vector<Child>& children) {
  for (std::size_t rank = 0; rank < children.size(); ++rank) {
    EXPECT_EQ(children[rank].wait(), 0) << children[rank].output();
    EXPECT_CONTAINS(children[rank].output(), fmt::format("formed rank={} size={} local={}/{} cross=0/1", rank,
                                                         children.size(), rank, children.size()));
  }
}

TEST(Init, OverTcpAddressWithoutASecret) {
  const std::string place = tcp_place();
  std::vector<Child> children;
  for (int rank = 0; rank < 3; ++rank) children.push_back(worker(as_rank(place, rank, 3)));
  expect_all_formed(children);
}

TEST(Init, OverTcpAddressWithASecret) {
  const Folder folder;
  const std::string secret = new_secret(folder);
  const std::string place = tcp_place();
  std::vector<Child> children;
  // Rank 0 comes last: the others wait for its listener.
  children.reserve(3);
  std::vector<Child> others;
  for (int rank = 1; rank < 3; ++rank) others.push_back(worker(as_rank(place, rank, 3, {"secret=" + secret})));
  children.push_back(worker(as_rank(place, 0, 3), {{"COHORT_SECRET_FILE", secret}}));
  for (Child& child : others) children.push_back(std::move(child));
  expect_all_formed(children);
}

// One machine plays several hosts: the ranks of each are beside each other, and a barrier goes between them.
TEST(Init, AsRanksOfSeveralHostsWithAndWithoutASecret) {
  const Folder folder;
  const std::string secret = new_secret(folder);
  for (const bool with_secret : {true, false}) {
    const std::string place = tcp_place();
    std::vector<Child> children;
    for (int rank = 0; rank < 5; ++rank) {
      std::vector<std::string> more = {"times=2"};
      if (with_secret) more.push_back("secret=" + secret);
      children.push_back(worker(as_rank(place, rank, 5, more), {{"COHORT_PRETEND_HOSTS", "2,3"}}));
    }
    for (int rank = 0; rank < 5; ++rank) {
      Child& child = children[static_cast<std::size_t>(rank)];
      EXPECT_EQ(child.wait(), 0) << child.output();
      // Rank 4 is the only one with the local rank 2.
      constexpr const char* kPlaces[] = {"local=0/2 cross=0/2", "local=1/2 cross=0/2", "local=0/3 cross=1/2",
                                         "local=1/3 cross=1/2", "local=2/3 cross=0/1"};
      EXPECT_CONTAINS(child.output(), fmt::format("formed rank={} size=5 {}", rank, kPlaces[rank]));
    }
  }
}

// Endings of one world's ranks, each with words of its own.
std::vector<std::pair<int, std::string>> endings(const std::vector<std::vector<std::string>>& ranks,
                                                 const Environment& environment = {}) {
  std::vector<Child> children;
  for (const auto& words : ranks) children.push_back(worker(words, environment));
  std::vector<std::pair<int, std::string>> all;
  for (Child& child : children) {
    const int status = child.wait();
    all.emplace_back(status, child.output());
  }
  return all;
}

TEST(Init, ThroughAChannelOfTheProgramsOwn) {
  const Folder folder;
  const std::string secret = new_secret(folder);
  for (const bool with_secret : {true, false}) {
    const auto channel = folder.path / (with_secret ? "with" : "without");
    std::filesystem::create_directory(channel);
    std::vector<std::vector<std::string>> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.push_back({"share=" + channel.string(), fmt::format("rank={}", rank), "size=3", "times=2"});
      if (with_secret) ranks.back().push_back("secret=" + secret);
    }
    for (const auto& [status, output] : endings(ranks, {{"COHORT_PRETEND_HOSTS", "2,1"}})) {
      EXPECT_EQ(status, 0) << output;
      const bool is_first = output.find("formed rank=0") != std::string::npos;
      // Once, though it forms two worlds.
      const std::string_view warning =
          "the secret of this world of 3 ranks goes through a channel of the program's own";
      const std::size_t at = output.find(warning);
      EXPECT_EQ(at != std::string::npos, is_first && !with_secret) << output;
      EXPECT_TRUE(at == std::string::npos || output.find(warning, at + 1) == std::string::npos) << output;
    }
    // A secret that ranks have is in no file; else any reader of the file has it.
    int files = 0;
    for (const auto& file : std::filesystem::directory_iterator(channel)) {
      std::string text;
      std::ifstream(file.path()) >> text;
      EXPECT_EQ(text.starts_with("1;-;"), with_secret) << text;
      ++files;
    }
    EXPECT_EQ(files, 2);
  }
}

TEST(Init, RanksWithAndWithoutASecretAreToldSo) {
  const Folder folder;
  const std::string secret = "secret=" + new_secret(folder);
  const std::string share = "share=" + folder.path.string();
  const auto ended = endings({{share, "rank=0", "size=2", secret, "init_timeout_ms=3000"},
                              {share, "rank=1", "size=2", "init_timeout_ms=3000"}});
  EXPECT_EQ(ended[1].first, 3);
  EXPECT_CONTAINS(ended[1].second, "rank 0 has a secret and this rank has none");
  EXPECT_EQ(ended[0].first, 3);
}

TEST(Init, WhatTheProgramsOwnChannelThrowsComesThrough) {
  const Folder folder;
  const auto ended = endings({{"share=" + folder.path.string(), "rank=1", "size=2", "init_timeout_ms=200"}});
  EXPECT_EQ(ended[0], std::pair(5, std::string("own: nobody has told\n")));
}

TEST(Init, AnAddressIsOpenToAllWhereTheNetworkIsTrusted) {
  const Folder folder;
  const std::string place = tcp_place();
  const Environment trusts = {{"COHORT_TRUST_NETWORK", "1"}};
  const auto ended = endings({as_rank(place, 0, 2), as_rank(place, 1, 2)}, trusts);
  for (const auto& [status, output] : ended) EXPECT_EQ(status, 0) << output;
  EXPECT_CONTAINS(ended[0].second, "the network is trusted (COHORT_TRUST_NETWORK=1): whoever reaches 127.0.0.1:");
  EXPECT_EQ(ended[1].second.find("is trusted"), std::string::npos) << ended[1].second;
  // A secret counts for more than the word.
  const std::string secret = new_secret(folder);
  Child keeper = worker(as_rank(place, 0, 2, {"secret=" + secret}), trusts);
  Child stranger = worker(as_rank(place, 1, 2, {"init_timeout_ms=3000"}), trusts);
  EXPECT_EQ(stranger.wait(), 3) << stranger.output();
  Child friendly = worker(as_rank(place, 1, 2, {"secret=" + secret}));
  EXPECT_EQ(friendly.wait(), 0) << friendly.output();
  EXPECT_EQ(keeper.wait(), 0) << keeper.output();
}

TEST(Init, OverAFileThatIsGoneAfterwards) {
  const Folder folder;
  const std::string path = folder.file("meeting");
  std::vector<Child> children;
  for (int rank = 0; rank < 3; ++rank)
    children.push_back(worker({fmt::format("init=file://{}?rank={}&world_size=3", path, rank)}));
  expect_all_formed(children);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path));
}

TEST(Init, ByTheVariablesThatTorchrunSets) {
  // MASTER_PORT is held by another process's store, as under torchrun.
  const auto held = value_or_throw(net::listen_on(net::any_loopback_port()));
  const auto port = value_or_throw(net::local_endpoint(held.get())).tcp.port;
  std::vector<Child> children;
  for (int rank = 0; rank < 2; ++rank) {
    children.push_back(worker({}, {{"RANK", std::to_string(rank)},
                                   {"WORLD_SIZE", "2"},
                                   {"LOCAL_RANK", std::to_string(rank)},
                                   {"LOCAL_WORLD_SIZE", "2"},
                                   {"MASTER_ADDR", "localhost"},
                                   {"MASTER_PORT", std::to_string(port)},
                                   {"TORCHELASTIC_RUN_ID", "none"}}));
  }
  expect_all_formed(children);
}

TEST(Init, AtTheStoreOfALauncher) {
  const auto secret = value_or_throw(net::Secret::generate());
  const auto memory = value_or_throw(secret.to_sealed_memfd());
  ASSERT_EQ(::fcntl(memory.get(), F_SETFD, 0), 0);  // inherited, as a launcher does it
  const store::StoreServer server({.secret = secret});
  std::vector<Child> children;
  for (int rank = 0; rank < 2; ++rank) {
    // Several worlds one after the other: the descriptor is read each time.
    children.push_back(worker({"times=3"}, {{"RANK", std::to_string(rank)},
                                            {"WORLD_SIZE", "2"},
                                            {"COHORT_STORE", net::to_string(server.endpoint())},
                                            {"COHORT_SECRET_FD", std::to_string(memory.get())},
                                            {"COHORT_TIMEOUT", "12.5"}}));
  }
  expect_all_formed(children);
  EXPECT_CONTAINS(children[0].output(), "timeout_ms=12500");
}

TEST(Init, WhoWasInAnEarlierEpochOfAJobMeetsWhoIsStartedInALaterOne) {
  const Folder folder;
  const auto secret = value_or_throw(net::Secret::generate());
  const auto memory = value_or_throw(secret.to_sealed_memfd());
  ASSERT_EQ(::fcntl(memory.get(), F_SETFD, 0), 0);
  const store::StoreServer server({.secret = secret});
  const auto start = [&](int rank, int epoch, std::vector<std::string> words) {
    return worker(std::move(words), {{"RANK", std::to_string(rank)},
                                     {"WORLD_SIZE", "2"},
                                     {"COHORT_STORE", net::to_string(server.endpoint())},
                                     {"COHORT_SECRET_FD", std::to_string(memory.get())},
                                     {"COHORT_RESTART", std::to_string(epoch)}});
  };
  Child survivor = start(0, 0, {"times=2", "until=" + folder.file("go")});
  Child other = start(1, 0, {});
  EXPECT_EQ(other.wait(), 0) << other.output();
  const net::Deadline deadline = net::deadline_in(std::chrono::seconds(30));
  store::connect_tcp_store("127.0.0.1", server.endpoint().tcp.port, secret, deadline)->set(store::kEpochKey, "1");
  Child left_over = start(1, 0, {});
  EXPECT_EQ(left_over.wait(), 3);
  EXPECT_CONTAINS(left_over.output(), "this process was started in attempt 0 of the job, which is in attempt 1 now");
  Child fresh = start(1, 1, {});
  std::ofstream(folder.file("go")).put('1');
  EXPECT_EQ(fresh.wait(), 0) << fresh.output();
  EXPECT_EQ(survivor.wait(), 0) << survivor.output();
}

TEST(Init, TwiceAtTheSamePlace) {
  const Folder folder;
  const std::string secret = new_secret(folder);
  for (const std::string& place : {tcp_place(), tcp_place() + "?world_size=3", "file://" + folder.file("meeting")}) {
    std::vector<Child> children;
    const bool with_secret = place.find('?') != std::string::npos;
    for (int rank = 0; rank < 3; ++rank) {
      children.push_back(worker(as_rank(place, rank, 3, {"times=4", with_secret ? "secret=" + secret : "secret="})));
    }
    expect_all_formed(children);
  }
}

TEST(Init, AWorldOfOneNeedsNobody) {
  Child plain = worker({});
  EXPECT_EQ(plain.wait(), 0) << plain.output();
  EXPECT_CONTAINS(plain.output(), "formed rank=0 size=1 local=0/1 cross=0/1 timeout_ms=1800000");
}

TEST(Init, AWorldOfOneWhereSeveralWereMeantIsRefused) {
  struct Case {
    std::vector<std::string> arguments;
    Environment environment;
    std::string variable;
  };
  const std::string place = tcp_place();
  const Case cases[] = {
      {as_rank(place, 0, 1), {{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "1"}}, "OMPI_COMM_WORLD_SIZE=4"},
      {as_rank(place, 0, 1), {{"PMI_SIZE", "3"}, {"PMI_RANK", "0"}}, "PMI_SIZE=3"},
      {as_rank(place, 0, 1),
       {{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}},
       "SLURM_STEP_NUM_TASKS=2"},
      {as_rank(place, 0, 1), {{"RANK", "2"}, {"WORLD_SIZE", "4"}}, "WORLD_SIZE=4"},
      {{},
       {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1"}},
       "PMI_SIZE=2"},
  };
  for (const Case& one : cases) {
    Child refused = worker(one.arguments, one.environment);
    EXPECT_EQ(refused.wait(), 3) << refused.output();
    EXPECT_CONTAINS(refused.output(), "InvalidArgument: ");
    EXPECT_CONTAINS(refused.output(), one.variable);
    Environment alone = one.environment;
    alone["COHORT_ALONE"] = "1";
    Child meant = worker(one.arguments, alone);
    EXPECT_EQ(meant.wait(), 0) << meant.output();
    EXPECT_CONTAINS(meant.output(), "formed rank=0 size=1");
  }
}

// As srun sets them for tasks of one node.
Environment as_task(int rank, int size, const std::string& job) {
  return {{"SLURM_JOB_ID", job},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_LOCALID", std::to_string(rank)},
          {"SLURM_NODEID", "0"},
          {"SLURM_STEP_NUM_TASKS", std::to_string(size)},
          {"SLURM_STEP_NUM_NODES", "1"},
          {"SLURM_STEP_TASKS_PER_NODE", std::to_string(size)},
          {"SLURM_STEP_NODELIST", "n1"}};
}

TEST(Init, TasksOfSlurmNeedNoAddress) {
  // Two jobs at once: each finds its own.
  const std::string job = std::to_string(::getpid());
  std::vector<Child> first;
  std::vector<Child> second;
  for (int rank = 0; rank < 3; ++rank) {
    first.push_back(worker({"times=2"}, as_task(rank, 3, job + "1")));
    second.push_back(worker({"times=2"}, as_task(rank, 3, job + "2")));
  }
  expect_all_formed(first);
  expect_all_formed(second);
}

TEST(Init, ThreadsOfAllProcessesAreOneWorld) {
  const std::string place = tcp_place();
  std::vector<Child> children;
  for (int rank = 0; rank < 2; ++rank)
    children.push_back(worker(as_rank(place, rank, 2, {"threads=2", "times=2"}), {{"COHORT_TIMEOUT", "77"}}));
  expect_all_formed(children);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_CONTAINS(children[static_cast<std::size_t>(rank / 2)].output(),
                    fmt::format("thread rank={} size=4 local={}/4 cross=0/1 sum=right timeout_ms=77000", rank, rank));
  }
}

TEST(Init, ProcessesThatGiveDifferentNumbersOfThreadsAreTold) {
  for (const auto& [second, said] :
       {std::pair("threads=1", "Mismatch: run_on_threads: the processes give [0, 1] threads"),
        std::pair("threads=0", "InvalidArgument: form_thread_world: a world of 0 ranks")}) {
    const std::string place = tcp_place();
    std::vector<Child> children;
    children.push_back(worker(as_rank(place, 0, 2, {"threads=0"})));
    children.push_back(worker(as_rank(place, 1, 2, {second})));
    for (Child& child : children) {
      EXPECT_EQ(child.wait(), 3) << child.output();
      EXPECT_CONTAINS(child.output(), said);
    }
  }
}

TEST(Init, TasksOfSlurmOnSeveralNodesNeedAPlace) {
  const Folder folder;
  std::ofstream(folder.file("slurm.conf")) << "AuthInfo=socket=" << folder.file("no-munged") << "\n";
  std::vector<Child> children;
  for (int rank = 0; rank < 2; ++rank) {
    Environment task = as_task(rank, 2, "7");
    task["SLURM_STEP_NUM_NODES"] = "2";
    task["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)";
    task["SLURM_STEP_NODELIST"] = "n[1-2]";
    task["SLURM_LOCALID"] = "0";
    task["SLURM_CONF"] = folder.file("slurm.conf");
    Child lost = worker({}, task);
    EXPECT_EQ(lost.wait(), 3) << lost.output();
    EXPECT_CONTAINS(lost.output(), "Unavailable: ");
    EXPECT_CONTAINS(lost.output(), "srun --mpi=pmi2");
    EXPECT_CONTAINS(lost.output(), "COHORT_INIT");
    // The advice in its error works: rank and size are the launcher's.
    task["COHORT_INIT"] = "file://" + folder.file("meeting");
    children.push_back(worker({}, task));
  }
  expect_all_formed(children);
}

TEST(Init, TasksWhoseLauncherHasNoPlaceMeetWhereTorchsVariablesSay) {
  const Folder folder;
  std::ofstream(folder.file("slurm.conf")) << "AuthInfo=socket=" << folder.file("no-munged") << "\n";
  const std::string port = std::to_string(free_port());
  const std::string secret = new_secret(folder);
  std::vector<Child> children;
  for (int rank = 0; rank < 2; ++rank) {
    Environment task = as_task(rank, 2, "8");
    task["SLURM_STEP_NUM_NODES"] = "2";
    task["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)";
    task["SLURM_STEP_NODELIST"] = "n[1-2]";
    task["SLURM_LOCALID"] = "0";
    task["SLURM_CONF"] = folder.file("slurm.conf");
    task["RANK"] = std::to_string(rank);
    task["WORLD_SIZE"] = "2";
    task["MASTER_ADDR"] = "127.0.0.1";
    task["MASTER_PORT"] = port;
    // Between hosts there is no other way without a secret.
    task["MASTER_ADDR"] = "192.0.2.1";
    Child lost = worker({}, task);
    EXPECT_EQ(lost.wait(), 3) << lost.output();
    EXPECT_CONTAINS(lost.output(), "MUNGE's socket");
    task["MASTER_ADDR"] = "127.0.0.1";
    task["COHORT_SECRET_FILE"] = secret;
    children.push_back(worker({}, task));
  }
  expect_all_formed(children);
}

TEST(Init, TasksOfTfConfigMeetAtTheChief) {
  const std::string port = std::to_string(free_port());
  std::vector<Child> children;
  for (int rank = 0; rank < 3; ++rank) {
    const std::string task =
        rank == 0 ? R"({"type":"chief","index":0})" : fmt::format(R"({{"type":"worker","index":{}}})", rank - 1);
    children.push_back(worker({}, {{"TF_CONFIG", fmt::format(R"({{"cluster":{{"chief":["localhost:{}"],)"
                                                             R"("worker":["localhost:1","localhost:2"]}},"task":{}}})",
                                                             port, task)}}));
  }
  expect_all_formed(children);
}

TEST(Init, ABatchScriptIsAloneAndSaysSo) {
  Child script = worker({}, {{"SLURM_JOB_ID", "7"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}});
  EXPECT_EQ(script.wait(), 0) << script.output();
  EXPECT_CONTAINS(script.output(), "formed rank=0 size=1");
  EXPECT_CONTAINS(script.output(), "none of its tasks");
}

TEST(Init, OneProcessForSeveralGpusSaysSo) {
  Child alone = worker({}, {{"SM_NUM_GPUS", "4"}});
  EXPECT_EQ(alone.wait(), 0) << alone.output();
  EXPECT_CONTAINS(alone.output(), "formed rank=0 size=1");
  EXPECT_CONTAINS(alone.output(), "SM_NUM_GPUS=4 says that 4 GPUs are there");
}

TEST(Init, EnvMeansTheFourVariables) {
  Child task = worker({"init=env://"}, as_task(0, 2, "9"));
  EXPECT_EQ(task.wait(), 3) << task.output();
  EXPECT_CONTAINS(task.output(), "Slurm started this process");
}

TEST(Init, AWrongSecretIsRefusedByName) {
  const Folder folder;
  const std::string right = new_secret(folder, "right");
  const std::string wrong = new_secret(folder, "wrong");
  const std::string place = tcp_place();
  Child first = worker(as_rank(place, 0, 2, {"secret=" + right}));
  Child intruder = worker(as_rank(place, 1, 2, {"secret=" + wrong}));
  EXPECT_EQ(intruder.wait(), 3);
  EXPECT_CONTAINS(intruder.output(), "authentication failed");
  EXPECT_CONTAINS(intruder.output(), "the secret differs");
  EXPECT_TRUE(first.wait_for_output("the secret differs")) << first.output();
  Child second = worker(as_rank(place, 1, 2, {"secret=" + right}));
  EXPECT_EQ(first.wait(), 0) << first.output();
  EXPECT_EQ(second.wait(), 0) << second.output();
}

TEST(Init, AnotherUserNeedsASecret) {
  if (::getuid() != 0) GTEST_SKIP() << "needs root to become another user";
  constexpr uid_t kNobody = 65534;
  const std::string place = tcp_place();
  Child first = worker(as_rank(place, 0, 2), {{"COHORT_LOG", "comm=debug"}});
  ASSERT_TRUE(first.wait_for_output("rank 0 of 2 is here")) << first.output();
  Child other = worker(as_rank(place, 1, 2), {}, kNobody);
  const int status = other.wait();
  if (status == 126 || status == 127) GTEST_SKIP() << "the worker's program cannot be run by another user here";
  EXPECT_EQ(status, 3) << other.output();
  EXPECT_CONTAINS(other.output(), "authentication failed");
  EXPECT_CONTAINS(other.output(), "uid 65534");
  EXPECT_CONTAINS(other.output(), "COHORT_SECRET_FILE");
  Child second = worker(as_rank(place, 1, 2));
  EXPECT_EQ(first.wait(), 0) << first.output();
  EXPECT_EQ(second.wait(), 0) << second.output();
}

TEST(Init, ASecretThatOthersMayReadIsRefused) {
  const Folder folder;
  const std::string secret = new_secret(folder);
  ::chmod(secret.c_str(), 0640);
  Child child = worker(as_rank(tcp_place(), 0, 2, {"secret=" + secret}));
  EXPECT_EQ(child.wait(), 3);
  EXPECT_CONTAINS(child.output(), "chmod 600 " + secret);
}

TEST(Init, AClosedSecretDescriptorIsExplained) {
  Child child =
      worker({}, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"COHORT_STORE", "127.0.0.1:1"}, {"COHORT_SECRET_FD", "200"}});
  EXPECT_EQ(child.wait(), 3);
  EXPECT_CONTAINS(child.output(), "descriptor 200 is not open");
  EXPECT_CONTAINS(child.output(), "if it is no rank, start it with COHORT_ALONE=1");
  EXPECT_CONTAINS(child.output(), "torchrun");
}

TEST(Init, DifferentWorldSizesAreRefusedOnAllRanks) {
  const Folder folder;
  const std::string secret = new_secret(folder);
  const std::string place = tcp_place();
  // Ranks 0 and 1 have size 3, rank 2 has size 4.
  std::vector<Child> children;
  for (int rank = 0; rank < 3; ++rank)
    children.push_back(worker(as_rank(place, rank, rank == 2 ? 4 : 3, {"secret=" + secret})));
  for (Child& child : children) {
    EXPECT_EQ(child.wait(), 3) << child.output();
    EXPECT_CONTAINS(child.output(), "Mismatch: ");
    EXPECT_CONTAINS(child.output(), "has 3 ranks");
    EXPECT_CONTAINS(child.output(), "says 4");
  }
}

TEST(Init, AnotherProgramIsRefusedUnlessItIsMeant) {
  const Folder folder;
  const std::string secret = new_secret(folder);
  const std::string copy = folder.file("other_worker");  // the same build id under another name
  std::filesystem::copy_file(COHORT_INIT_WORKER, copy);
  const auto run_both = [&](const Environment& environment) {
    const std::string place = tcp_place();
    auto second = as_rank(place, 1, 2, {"secret=" + secret});
    second.insert(second.begin(), copy);
    std::vector<Child> children;
    children.push_back(worker(as_rank(place, 0, 2, {"secret=" + secret}), environment));
    children.emplace_back(ChildOptions{std::move(second), environment, {}});
    return children;
  };
  auto refused = run_both({});
  for (Child& child : refused) {
    EXPECT_EQ(child.wait(), 3) << child.output();
    EXPECT_CONTAINS(child.output(), "Mismatch: ");
    EXPECT_CONTAINS(child.output(), "is the program 'init_worker (");
    EXPECT_CONTAINS(child.output(), "is 'other_worker (");
  }
  auto meant = run_both({{"COHORT_PROGRAM", "both"}});
  expect_all_formed(meant);
}

TEST(Init, ARankThatIsClaimedTwiceBelongsToTheFirst) {
  const Folder folder;
  for (const std::string& place : {tcp_place(), "file://" + folder.file("meeting")}) {
    Child first = worker(as_rank(place, 1, 3), {{"COHORT_LOG", "comm=debug"}});
    Child zero = worker(as_rank(place, 0, 3));
    ASSERT_TRUE(first.wait_for_output("rank 1 of 3 is here")) << first.output();
    Child second = worker(as_rank(place, 1, 3));
    EXPECT_EQ(second.wait(), 3) << second.output();
    EXPECT_CONTAINS(second.output(), "rank 1 is taken");
    EXPECT_CONTAINS(second.output(), fmt::format("pid {}", first.pid()));
    // The rank that was refused does not spoil it for the others. (A file counts its visitors: 3 places are taken.)
    if (place.rfind("file", 0) == 0) continue;
    Child third = worker(as_rank(place, 2, 3));
    EXPECT_EQ(third.wait(), 0) << third.output();
    EXPECT_EQ(first.wait(), 0) << first.output();
    EXPECT_EQ(zero.wait(), 0) << zero.output();
  }
}

TEST(Init, RanksThatDoNotComeAreNamed) {
  const Folder folder;
  for (const std::string& place : {tcp_place(), "file://" + folder.file("meeting")}) {
    Child zero = worker(as_rank(place, 0, 5, {"init_timeout_ms=6000"}));
    Child three = worker(as_rank(place, 3, 5, {"init_timeout_ms=6000"}));
    for (Child* child : {&zero, &three}) {
      EXPECT_EQ(child->wait(), 3) << child->output();
      EXPECT_CONTAINS(child->output(), "Timeout: ");
      EXPECT_CONTAINS(child->output(), "3 of 5 ranks did not come in time: 1, 2, 4");
      EXPECT_CONTAINS(child->output(), fmt::format("pid {}", three.pid()));
    }
  }
}

TEST(Init, ARankThatIsKilledMeanwhileIsNamed) {
  const Folder folder;
  for (const std::string& place : {tcp_place(), "file://" + folder.file("meeting")}) {
    const Environment talking = {{"COHORT_LOG", "comm=debug"}};
    Child zero = worker(as_rank(place, 0, 4), talking);
    Child one = worker(as_rank(place, 1, 4), talking);
    Child two = worker(as_rank(place, 2, 4), talking);
    for (Child* child : {&zero, &one, &two}) ASSERT_TRUE(child->wait_for_output("of 4 is here")) << child->output();
    two.kill(SIGKILL);
    for (Child* child : {&zero, &one}) {
      EXPECT_EQ(child->wait(seconds(30)), 3) << child->output();
      EXPECT_CONTAINS(child->output(), "PeerLost: ");
      EXPECT_CONTAINS(child->output(), fmt::format("pid {}) died before the world was formed", two.pid()));
    }
  }
}

TEST(Init, APortThatIsTakenNamesItsHolder) {
  const Folder folder;
  const std::string secret = new_secret(folder);
  const auto held = value_or_throw(net::listen_on(net::any_loopback_port()));
  const auto port = value_or_throw(net::local_endpoint(held.get())).tcp.port;
  Child child = worker(as_rank(fmt::format("tcp://127.0.0.1:{}", port), 0, 2, {"secret=" + secret}));
  EXPECT_EQ(child.wait(), 3);
  EXPECT_CONTAINS(child.output(), "cannot listen at");
  EXPECT_CONTAINS(child.output(), fmt::format("held by pid {} (", ::getpid()));
}

TEST(Init, ANameThatDoesNotResolveIsSaid) {
  Child child = worker(as_rank("tcp://no-such-host.invalid:29500", 1, 2));
  EXPECT_EQ(child.wait(), 3);
  EXPECT_CONTAINS(child.output(), "Unavailable: ");
  EXPECT_CONTAINS(child.output(), "no-such-host.invalid");
}

TEST(Init, AnotherHostNeedsASecret) {
  // 192.0.2.0/24 is for documentation: nobody's address, so not this host's.
  Child child = worker(as_rank("tcp://192.0.2.1:29500", 1, 2));
  EXPECT_EQ(child.wait(), 3);
  EXPECT_CONTAINS(child.output(), "not this host");
  EXPECT_CONTAINS(child.output(), "COHORT_SECRET_FILE");
}

TEST(Init, AFileLeftByAnEarlierJobIsRefused) {
  const Folder folder;
  const std::string place = "file://" + folder.file("meeting");
  Child dead = worker(as_rank(place, 1, 2), {{"COHORT_LOG", "comm=debug"}});
  ASSERT_TRUE(dead.wait_for_output("rank 1 of 2 is here")) << dead.output();
  dead.kill(SIGKILL);
  dead.wait();
  for (int rank = 0; rank < 2; ++rank) {
    Child child = worker(as_rank(place, rank, 2));
    EXPECT_EQ(child.wait(), 3) << child.output();
    EXPECT_CONTAINS(child.output(), "Unavailable: ");
    EXPECT_CONTAINS(child.output(), "left by an earlier job");
    EXPECT_CONTAINS(child.output(), fmt::format("pid {} ", dead.pid()));
    EXPECT_CONTAINS(child.output(), "rm '" + folder.file("meeting") + "'");
  }
}

TEST(Init, SixtyFourProcessesFormAWorld) {
  constexpr int kRanks = 64;
  const Folder folder;
  const std::string secret = new_secret(folder);
  for (const bool with_secret : {false, true}) {
    const std::string place = tcp_place();
    const auto begun = std::chrono::steady_clock::now();
    std::vector<Child> children;
    for (int rank = 0; rank < kRanks; ++rank) {
      children.push_back(
          worker(as_rank(place, rank, kRanks, {"barrier=0", with_secret ? "secret=" + secret : "secret="})));
    }
    for (Child& child : children) ASSERT_TRUE(child.wait_for_output("formed ")) << child.output();
    const double seconds_taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    for (Child& child : children) EXPECT_EQ(child.wait(), 0) << child.output();
    fmt::print("64 processes, {}: formed within {:.2f} s of the first one's start\n", with_secret ? "TLS" : "same user",
               seconds_taken);
    RecordProperty(with_secret ? "seconds_tls" : "seconds_same_user", fmt::format("{:.3f}", seconds_taken));
    // The aim is 2 s on a quiet machine of 2 cores; the tests' machine may not be quiet.
    EXPECT_LT(seconds_taken, 20.0);
  }
}

}  // namespace
}  // namespace cohort::test
