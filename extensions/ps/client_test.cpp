// Workers that are threads, and servers, over real connections.
#include "base/files.h"
#include "net/secret.h"
#include "ps/sparse_table.h"
#include "ps/tests/testing.h"
#include "ps/tests/testing_counters.h"
#include "train/formats/checkpoint_folder.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>

namespace cohort::ps {
namespace {

using namespace testing;

TEST(Client, PushesAndPullsOverSeveralServers) {
  for (const std::size_t count : {1U, 2U, 3U, 5U}) {
    const Servers servers(count);
    Client client = servers.client();
    Table table = client.table("user \"α\"\n", counters(Consistency::async(), 3));
    Keys keys(1000);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i * i;
    Floats gradients(keys.size() * 3);
    for (std::size_t i = 0; i < gradients.size(); ++i) gradients[i] = -static_cast<float>(i);
    table.push(keys, gradients).wait();
    Floats expected(gradients.size());
    std::transform(gradients.begin(), gradients.end(), expected.begin(), [](float g) { return -g; });
    EXPECT_EQ(pull(table, keys), expected);
    std::reverse(keys.begin(), keys.end());
    EXPECT_EQ(pull(table, {keys[0], keys[0], 999999999}), (Floats{2997, 2998, 2999, 2997, 2998, 2999, 0, 0, 0}));
    const TableStats stats = table.stats();
    EXPECT_EQ(stats.rows, keys.size());
    EXPECT_EQ(stats.rows_of_servers.size(), count);
    for (const std::uint64_t rows : stats.rows_of_servers) EXPECT_GT(rows, 0U);
  }
}

TEST(Client, EdgesOfKeysAndCalls) {
  const Servers servers(2);
  Client client = servers.client();
  Table table = client.table("t", counters(Consistency::async()));
  table.push({}, {}).wait();
  EXPECT_TRUE(pull(table, {}).empty());
  const Keys edges{0, ~std::uint64_t{0}, static_cast<std::uint64_t>(-5), 0};
  table.push(edges, Floats{-1, -2, -3, -4}).wait();
  EXPECT_EQ(pull(table, edges), (Floats{5, 2, 3, 5})) << "duplicates are added";
  EXPECT_EQ(table.stats().steps, 3U);
  EXPECT_TRUE(contains(error_of([&] { (void)table.push(edges, Floats{1}); }), "4 keys need 4 floats"));
  EXPECT_TRUE(
      contains(error_of([&] { (void)client.table("z", counters(Consistency::async(), 0)); }), "rows of 0 floats"));
  EXPECT_TRUE(contains(error_of([&] { (void)client.table("", counters(Consistency::async())); }), "without a name"));
}

TEST(Client, AMillionKeysInOneCall) {
  const Servers servers(2);
  Client client = servers.client();
  Table table = client.table("t", counters(Consistency::async(), 2));
  Keys keys(1'000'000);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i * 3;
  const Floats gradients(keys.size() * 2, -1);
  table.push(keys, gradients).wait();
  Work second = table.push(keys, gradients);
  Work third = table.push(keys, gradients);
  const Floats rows = pull(table, keys);
  EXPECT_TRUE(std::all_of(rows.begin(), rows.end(), [](float value) { return value == 3; }))
      << "what was sent before is in what is read";
  second.wait();
  third.wait();
}

TEST(Client, RowsOf64KiB) {
  const Servers servers(2);
  Client client = servers.client();
  Table table = client.table("t", counters(Consistency::async(), 16384));
  const Keys keys{1, 2, 3, 4, 5};
  const Floats gradients(keys.size() * 16384, -2);
  table.push(keys, gradients).wait();
  const Floats rows = pull(table, keys);
  EXPECT_TRUE(std::all_of(rows.begin(), rows.end(), [](float value) { return value == 2; }));
}

TEST(Client, AssignAndErase) {
  const Servers servers(3);
  Client client = servers.client();
  Table table = client.table("t", counters(Consistency::sync()));
  table.assign(Keys{1, 2, 1}, Floats{5, 6, 7}).wait();
  EXPECT_EQ(pull(table, {1, 2}), (Floats{7, 6}));
  table.erase(Keys{1, 3}).wait();
  EXPECT_EQ(pull(table, {1, 2}), (Floats{0, 6}));
}

TEST(Client, DenseVariablesOfAnySize) {
  for (const std::size_t count : {1U, 3U}) {
    const Servers servers(count);
    Client client = servers.client();
    for (const std::int64_t elements : {1, 10, 16384, 16385, 100000}) {
      VariableOptions options;
      options.elements = elements;
      options.initial = 0.5;
      options.optimizer = optim::Sgd{.lr = 1};
      options.consistency = Consistency::async();
      Variable variable = client.variable("v" + std::to_string(elements), options);
      Floats values(static_cast<std::size_t>(elements)), gradients(values.size());
      variable.pull(values).wait();
      EXPECT_EQ(values, Floats(values.size(), 0.5F));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
      variable.assign(values).wait();
      std::fill(gradients.begin(), gradients.end(), 1.0F);
      variable.push_pull(gradients, values).wait();
      for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], static_cast<float>(i) - 1);
    }
  }
  const Servers servers(1);
  Client client = servers.client();
  VariableOptions options;
  options.elements = 3;
  options.optimizer = optim::RowAdagrad{};
  EXPECT_TRUE(contains(error_of([&] { (void)client.variable("v", options); }), "RowAdagrad"));
}

TEST(Client, WhatIsNotFiniteIsNamedAndNothingIsSent) {
  const Servers servers(2);
  Client client = servers.client();
  Table table = client.table("t", counters(Consistency::async(), 2));
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    const Error error = error_of([&] { (void)table.push(Keys{4, 77}, Floats{1, 1, 1, bad}); });
    EXPECT_EQ(error.code(), ErrorCode::NonFinite);
    EXPECT_TRUE(contains(error, "the gradient of key 77"));
    const Error assigned = error_of([&] { (void)table.assign(Keys{4, 77}, Floats{1, 1, 1, bad}); });
    EXPECT_EQ(assigned.code(), ErrorCode::NonFinite);
    EXPECT_TRUE(contains(assigned, "assign to table \"t\": the row of key 77"));
  }
  EXPECT_EQ(pull(table, {4, 77}), Floats(4));
  VariableOptions options;
  options.elements = 20000;  // of two rows
  Variable variable = client.variable("v", options);
  Floats values(20000);
  values[17000] = INFINITY;
  EXPECT_TRUE(contains(error_of([&] { (void)variable.push(values); }), "variable \"v\": element 17000 is inf"));
  EXPECT_TRUE(contains(error_of([&] { (void)variable.assign(values); }), "variable \"v\": element 17000 is inf"));
}

TEST(Client, ALossThatARequestHasReportedIsNotReportedAgainWhenItLeaves) {
  for (const bool reported : {true, false}) {
    Servers servers(1);
    ClientOptions options = servers.options();
    options.timeout = std::chrono::milliseconds(300);
    ::testing::internal::CaptureStderr();
    {
      Client client = Client::connect(options);
      Table table = client.table("t", {.dim = 1});
      servers.end(0);
      if (reported) error_of([&] { table.push(Keys{1}, Floats{1}).wait(); });
    }
    const std::string text = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(text.find("worker 0 leaves: ") == std::string::npos, reported) << text;
  }
}

TEST(Client, WhoHasLeftAsksNothingAnyMore) {
  const Servers servers(2);
  Client client = servers.client();
  Table table = client.table("t", counters(Consistency::async()));
  Variable variable = client.variable("v", {4, 0, optim::Sgd{}, Consistency::async()});
  client.leave();
  client.leave();
  Floats row(1), values(4);
  const auto refused = [](const std::function<void()>& call) {
    const Error error = error_of(call);
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_TRUE(contains(error, "worker 0 has left the servers"));
  };
  refused([&] { (void)table.pull(Keys{1}, row); });
  refused([&] { (void)table.push(Keys{1}, row); });
  refused([&] { (void)table.assign(Keys{1}, row); });
  refused([&] { (void)table.erase(Keys{1}); });
  refused([&] { (void)table.stats(); });
  refused([&] { (void)variable.pull(values); });
  refused([&] { (void)client.table("u", counters(Consistency::async())); });
  refused([&] { (void)client.clock(); });
  refused([&] { client.barrier(); });
  refused([&] { (void)client.snapshot("nowhere"); });
  refused([&] { (void)client.restore("nowhere"); });
}

TEST(Client, NobodyAtAnEndpointIsToldOfAsItWas) {
  ClientOptions options;
  options.servers = {unused_name(), unused_name()};
  options.connect_timeout = std::chrono::milliseconds(0);
  const Error at_once = error_of([&] { (void)Client::connect(options); });
  EXPECT_EQ(at_once.code(), ErrorCode::Timeout);
  EXPECT_TRUE(contains(at_once, "in the one attempt that there was time for"));
  EXPECT_TRUE(contains(at_once, "is the parameter server running"));
  options.connect_timeout = std::chrono::milliseconds(2500);  // more than the first attempt
  EXPECT_TRUE(contains(error_of([&] { (void)Client::connect(options); }), "nobody has served its rows for 2."));
  for (const char* wrong : {"@", "here"}) {
    options.servers = {wrong};
    EXPECT_EQ(error_of([&] { (void)Client::connect(options); }).code(), ErrorCode::InvalidArgument);
  }
}

TEST(Client, OnALoopbackAddressThisUsersProcessesNeedNoSecret) {
  // (No port is opened: it makes a name.)
  const std::string place = ":" + std::to_string(10'000 + ::getpid() % 50'000);
  ServerOptions server_options;
  server_options.endpoint = "localhost" + place;
  const Server server(server_options);
  ClientOptions options;
  options.servers = {"127.0.0.1" + place};
  options.connect_timeout = std::chrono::seconds(30);
  Client client = Client::connect(options);
  EXPECT_EQ(client.table("t", counters(Consistency::async(), 1)).stats().rows, 0U);
  options.servers = {"192.0.2.1" + place};
  EXPECT_TRUE(contains(error_of([&] { (void)Client::connect(options); }), "COHORT_TRUST_NETWORK=1 says so"));
}

TEST(Client, AServerRefusesOptionsThatMeanNothing) {
  ServerOptions options;
  options.endpoint = unused_name();
  options.patience = std::chrono::milliseconds(-1);
  EXPECT_TRUE(contains(error_of([&] { const Server server(options); }), "a patience of -1 ms"));
  options.patience = std::chrono::seconds(3);
  options.replicas = 1;
  EXPECT_TRUE(contains(error_of([&] { const Server server(options); }), "leave replicas out"));
  options.replicas = {};
  const Server server(options);
  EXPECT_TRUE(contains(error_of([&] { const Server second(options); }), "choose another name"));
}

TEST(Client, OptionsThatDifferAreRefusedNamingBoth) {
  const Servers servers(2);
  run_workers(2, [&](int worker) {
    Client client = servers.client(worker, 2);
    if (worker == 0) (void)client.table("t", counters(Consistency::async(), 8));
    client.barrier();
    if (worker == 1) {
      const Error error = error_of([&] { (void)client.table("t", counters(Consistency::async(), 9)); });
      EXPECT_EQ(error.code(), ErrorCode::Mismatch);
      EXPECT_TRUE(contains(error, "dim 8 and 9"));
      EXPECT_TRUE(contains(error, "parameter server 0 at"));
    }
    client.barrier();
    EXPECT_EQ(client.table("t", counters(Consistency::async(), 8)).options().dim, 8);
  });
}

TEST(Client, WorkersThatDoNotAgreeAreRefused) {
  const Servers servers(2);
  Client first = servers.client(0, 2);
  EXPECT_TRUE(contains(error_of([&] { (void)servers.client(1, 3); }), "there are 3 workers; the first one said 2"));
  ClientOptions options = servers.options(1, 2);
  std::swap(options.servers[0], options.servers[1]);
  EXPECT_TRUE(contains(error_of([&] { (void)Client::connect(options); }), "takes this for parameter server"));
  options = servers.options(1, 2);
  options.worker = 2;
  EXPECT_TRUE(contains(error_of([&] { (void)Client::connect(options); }), "worker 2 of 2"));
}

TEST(Client, AServerThatIsNotThereIsNamed) {
  Servers servers(2);
  servers.end(1);
  ClientOptions options = servers.options();
  options.connect_timeout = std::chrono::milliseconds(300);
  const Error error = error_of([&] { (void)Client::connect(options); });
  EXPECT_EQ(error.code(), ErrorCode::Timeout);
  EXPECT_TRUE(contains(error, "parameter server 1 at " + servers.names()[1]));
}

TEST(Client, AServerThatDiesIsNamedWhenTheTimeIsUp) {
  Servers servers(2);
  ClientOptions options = servers.options();
  options.timeout = std::chrono::milliseconds(500);
  Client client = Client::connect(options);
  Table table = client.table("t", counters(Consistency::async()));
  Keys keys(100);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  const Floats gradients(keys.size(), 1);
  servers.end(1);
  EXPECT_TRUE(contains(error_of([&] { table.push(keys, gradients).wait(); }), "parameter server 1 at"));
}

TEST(Client, MemoryThatIsNotThereIsRefusedBeforeItIsTaken) {
  ServerOptions options;
  options.memory = std::size_t{8} << 20;
  const Servers servers(1, options);
  Client client = servers.client();
  Table table = client.table("t", counters(Consistency::async(), 64));
  std::optional<Error> refused;
  Keys keys(1000);
  const Floats gradients(keys.size() * 64, -1);
  for (std::uint64_t round = 0; round < 100 && !refused; ++round) {
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = round * 1000 + i;
    try {
      table.push(keys, gradients).wait();
    } catch (const Error& error) {
      refused = error;
    }
  }
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code(), ErrorCode::Unavailable);
  EXPECT_TRUE(contains(*refused, "no memory for"));
  EXPECT_LE(table.stats().bytes, options.memory);
  EXPECT_GE(table.stats().bytes, options.memory / 4);
  const std::uint64_t rows = table.stats().rows;
  EXPECT_EQ(rows % 1000, 0U) << "all of a push, or nothing of it";
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  table.push(keys, gradients).wait();
  EXPECT_EQ(pull(table, {5})[0], 2) << "rows that are there go on";
}

// Pushes that wait count with the rows that they make, and with what adds them up, in all tables.
TEST(Client, MemoryHoldsWhenTheClockEnds) {
  ServerOptions options;
  options.memory = std::size_t{48} << 20;
  const Servers servers(1, options);
  Client client = servers.client();
  std::vector<Table> tables;
  for (int i = 0; i < 8; ++i)
    tables.push_back(client.table("t" + std::to_string(i), counters(Consistency::sync(), 64)));
  std::optional<Error> refused;
  Keys keys(500);
  const Floats gradients(keys.size() * 64, -1);
  std::vector<std::uint64_t> rows(tables.size(), 0);
  for (std::uint64_t round = 0; round < 1000 && !refused; ++round) {
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = round * 500 + i;
    try {
      for (std::size_t i = 0; i < tables.size(); ++i, rows[i - 1] += keys.size())
        tables[i].push(keys, gradients).wait();
    } catch (const Error& error) {
      refused = error;
    }
  }
  ASSERT_TRUE(refused);
  EXPECT_TRUE(contains(*refused, "pushes wait that need more"));
  client.clock();
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    EXPECT_EQ(tables[i].stats().rows, rows[i]);
    bytes += tables[i].stats().bytes;
  }
  EXPECT_LE(bytes, options.memory);
  EXPECT_GE(bytes, options.memory / 3);
  // The same rows again: they are there, so only what waits is more.
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  for (int clock = 0; clock < 3; ++clock) {
    for (Table& table : tables) table.push(keys, gradients).wait();
    client.clock();
  }
  EXPECT_EQ(pull(tables[7], {5})[0], 4);
}

// ---- snapshots ----

/// Trains so many clocks with two workers; snapshots after the first half if `folder` is not empty; or restores there
/// first and does the second half. Returns the rows and the dense values at the end.
std::pair<Floats, Floats> train(std::size_t count, const std::string& snapshot_to, const std::string& restore_from) {
  constexpr std::int64_t kHalf = 6;
  Keys all(40);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  std::pair<Floats, Floats> result{Floats(all.size() * 4), Floats(40000)};
  const Servers servers(count);
  run_workers(2, [&](int worker) {
    Client client = servers.client(worker, 2);
    if (!restore_from.empty() && worker == 0 && client.restore(restore_from) != kHalf) ADD_FAILURE() << "another clock";
    client.barrier();
    TableOptions options = counters(Consistency::sync(), 4);
    options.optimizer = optim::Adam{};
    options.initializer = Initializer::normal(0, 1);
    options.admission = 2;
    Table table = client.table("sparse", options);
    VariableOptions dense;
    dense.elements = 40000;
    dense.optimizer = optim::Sgd{.lr = 0.1, .momentum = 0.9};
    Variable variable = client.variable("dense", dense);
    for (std::int64_t clock = restore_from.empty() ? 0 : kHalf; clock < 2 * kHalf; ++clock) {
      if (clock == kHalf && !snapshot_to.empty() && worker == 0) (void)client.snapshot(snapshot_to);
      const auto [keys, gradients] = batch(worker, clock, 4);
      table.push(keys, gradients).wait();
      variable.push(Floats(40000, static_cast<float>(worker + clock))).wait();
      client.clock();
    }
    Floats rows(all.size() * 4), values(40000);
    table.pull(all, rows).wait();
    variable.pull(values).wait();
    if (worker == 0) result = {rows, values};
    client.barrier();
  });
  return result;
}

TEST(Snapshot, GoesOnToTheBitWithAnotherNumberOfServers) {
  const Folder folder;
  const auto expected = train(3, folder.path(), "");
  EXPECT_EQ(train(1, "", ""), expected);
  for (const std::size_t count : {1U, 2U, 3U, 5U}) EXPECT_EQ(train(count, "", folder.path()), expected);
}

TEST(Snapshot, WhatIsWrongIsSaid) {
  const Folder folder;
  const Servers servers(2);
  Client client = servers.client();
  EXPECT_TRUE(contains(error_of([&] { (void)client.restore(folder.path()); }), "there is no whole snapshot"));
  Table empty = client.table("empty", counters(Consistency::async()));
  const std::string made = client.snapshot(folder.path());
  EXPECT_EQ(client.restore(folder.path()), 0) << "a table without rows";
  std::filesystem::resize_file(made + "/ps-1-of-2.rows", 10);
  EXPECT_TRUE(contains(error_of([&] { (void)client.restore(folder.path()); }), "ps-1-of-2.rows"));
  EXPECT_TRUE(contains(error_of([&] { (void)client.snapshot("/proc/nowhere"); }), "/proc/nowhere"));
}

TEST(Snapshot, ADamagedOneIsPassedOverAsAWhole) {
  const Folder folder;
  const Keys keys{1, 2, 3, 4, 5, 6, 7, 8};
  Floats first;
  std::string newest;
  {
    const Servers servers(2);
    Client client = servers.client();
    Table table = client.table("t", counters(Consistency::async(), 1));
    table.push(keys, Floats(keys.size(), -1)).wait();
    (void)client.snapshot(folder.path());
    first = pull(table, keys);
    table.push(keys, Floats(keys.size(), -1)).wait();
    newest = client.snapshot(folder.path());
  }
  {
    std::fstream file(newest + "/ps-1-of-2.rows", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('x');
  }
  const Servers servers(2);
  Client client = servers.client();
  (void)client.restore(folder.path());
  Table table = client.table("t", counters(Consistency::async(), 1));
  EXPECT_EQ(pull(table, keys), first);
}

TEST(Snapshot, AnOlderOneIsNotTakenForWhatCannotBeJudged) {
  const Folder folder;
  const Servers servers(1);
  Client client = servers.client();
  (void)client.snapshot(folder.path());
  const std::string newest = client.snapshot(folder.path());
  const auto whole = value_or_throw(formats::read_checkpoint(newest));
  formats::Manifest newer = whole.manifest;
  newer.version = formats::kManifestVersion + 1;
  value_or_throw(sys::write_file_atomically(newest + "/manifest.json", value_or_throw(formats::to_json(newer))));
  EXPECT_TRUE(contains(error_of([&] { (void)client.restore(folder.path()); }), "a newer Cohort saved this"));
  for (const char* const file : {"manifest.json", "ps-0-of-1.rows"}) {
    value_or_throw(
        sys::write_file_atomically(newest + "/manifest.json", value_or_throw(formats::to_json(whole.manifest))));
    std::filesystem::remove(newest + "/" + file);
    std::filesystem::create_symlink(file, newest + "/" + file);  // to itself: not even root can read it
    const Error error = error_of([&] { (void)client.restore(folder.path()); });
    EXPECT_EQ(error.code(), ErrorCode::Io) << error.what();
    std::filesystem::remove(newest + "/" + file);
  }
}

TEST(Snapshot, TheNewestAreKept) {
  const Folder folder;
  const Servers servers(1);
  Client client = servers.client();
  for (int i = 0; i < 3; ++i) (void)client.snapshot(folder.path());
  const auto snapshots = [&] {
    return std::distance(std::filesystem::directory_iterator(folder.path()), std::filesystem::directory_iterator());
  };
  EXPECT_EQ(snapshots(), 3);
  const std::string newest = client.snapshot(folder.path(), {.keep = 2});
  EXPECT_EQ(snapshots(), 2);
  EXPECT_TRUE(std::filesystem::exists(newest));
  EXPECT_EQ(error_of([&] { (void)client.snapshot(folder.path(), {.keep = -1}); }).code(), ErrorCode::InvalidArgument);
}

// ---- a journal ----

TEST(Journal, AServerThatIsStartedAgainHasWhatItHad) {
  const Folder folder;
  ServerOptions options;
  options.journal = folder.path() + "/journal";
  Servers servers(1, options);
  Client client = servers.client();
  TableOptions of_table = counters(Consistency::sync(), 3);
  of_table.optimizer = optim::Adam{};
  Table table = client.table("t", of_table);
  const Keys keys{1, 2, 3};
  for (int round = 0; round < 4; ++round) {
    table.push(keys, Floats(9, 1)).wait();
    client.clock();
    table.push(keys, Floats(9, 2)).wait();  // of a clock that has not ended
    const Floats before = pull(table, keys);
    servers.end(0);
    servers.start(0, options);
    EXPECT_EQ(pull(table, keys), before);
    client.clock();
    EXPECT_NE(pull(table, keys), before);
  }
  EXPECT_TRUE(contains(error_of([&] { const Servers second(1, options); }), "another process has it"));
}

TEST(Journal, WithoutOneWhatIsLostIsSaid) {
  Servers servers(2);
  Client client = servers.client();
  Table table = client.table("t", counters(Consistency::async()));
  Keys keys(100);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  table.push(keys, Floats(keys.size(), 1)).wait();
  servers.end(1);
  servers.start(1, {});
  const Error error = error_of([&] { table.push(keys, Floats(keys.size(), 1)).wait(); });
  EXPECT_TRUE(contains(error, "parameter server 1 at"));
  EXPECT_TRUE(contains(error, "3 of this worker's 3 changes are lost"));
}

// A limit of file size stands for a full disk.
TEST(Journal, AChangeThatItsDiskHadNoSpaceForIsRefusedAndNotLost) {
  const Folder folder;
  ServerOptions options;
  options.journal = folder.path() + "/journal";
  Servers servers(1, options);
  Client client = servers.client();
  Table table = client.table("t", counters(Consistency::async(), 64));
  const Keys keys{1, 2, 3};
  const Floats gradients(keys.size() * 64, -1);
  table.push(keys, gradients).wait();
  const Floats before = pull(table, keys);
  const auto usual_action = std::signal(SIGXFSZ, SIG_IGN);
  rlimit usual{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &usual), 0);
  rlimit small = usual;
  small.rlim_cur = std::filesystem::file_size(options.journal) + 10;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  for (int i = 0; i < 2; ++i) {
    const Error error = error_of([&] { table.push(keys, gradients).wait(); });
    EXPECT_EQ(error.code(), ErrorCode::Io) << error.what();
    EXPECT_TRUE(contains(error, "this server makes no changes any more"));
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &usual), 0);
  std::signal(SIGXFSZ, usual_action);
  servers.end(0);
  servers.start(0, options);
  EXPECT_EQ(pull(table, keys), before);
  for (int i = 0; i < 2; ++i) table.push(keys, gradients).wait();
  Floats twice = before;
  for (float& one : twice) one += 2;
  EXPECT_EQ(pull(table, keys), twice);
}

TEST(Journal, ATornRecordIsCutOffAndADamagedFileIsRefused) {
  const Folder folder;
  ServerOptions options;
  options.journal = folder.path() + "/journal";
  {
    Servers servers(1, options);
    Client client = servers.client();
    Table table = client.table("t", counters(Consistency::async()));
    table.push(Keys{1}, Floats{-1}).wait();
    table.push(Keys{1}, Floats{-1}).wait();
    servers.end(0);
    std::filesystem::resize_file(options.journal, std::filesystem::file_size(options.journal) - 3);
    servers.start(0, options);
    // The worker knows better than a journal that has lost its last record.
    EXPECT_TRUE(contains(error_of([&] { (void)pull(table, {1}); }), "1 of this worker's 4 changes are lost"));
  }
  std::ofstream(options.journal) << "something else that is no journal";
  EXPECT_EQ(error_of([&] { const Servers servers(1, options); }).code(), ErrorCode::Corrupt);
}

TEST(Client, OverTcpWithASecret) {
  const Folder folder;
  const std::string file = folder.path() + "/secret";
  value_or_throw(net::write_new_secret_file(file));
  ServerOptions serving;
  serving.secret_file = file;
  const Server server(serving);
  ClientOptions options;
  options.servers = {server.endpoint()};
  options.secret_file = file;
  options.connect_timeout = std::chrono::seconds(20);
  Client client = Client::connect(options);
  Table table = client.table("t", counters(Consistency::async(), 64));
  Keys keys(10000);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  table.push(keys, Floats(keys.size() * 64, -1)).wait();
  EXPECT_EQ(pull(table, {77})[63], 1);
  const std::string other = folder.path() + "/other";
  value_or_throw(net::write_new_secret_file(other));
  options.secret_file = other;
  EXPECT_EQ(error_of([&] { (void)Client::connect(options); }).code(), ErrorCode::InvalidArgument);
}

}  // namespace
}  // namespace cohort::ps
