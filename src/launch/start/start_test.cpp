#include "base/hardware.h"
#include "launch/plan/rank_environment.h"
#include "launch/start/hosts.h"
#include "launch/start/invitation.h"
#include "launch/start/starter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace cohort::launch {
namespace {

using namespace std::chrono_literals;

TEST(CaptureTest, TakesTextAndStatus) {
  const auto got = capture({"sh", "-c", "echo out; echo err >&2; exit 3"}, 30s);
  ASSERT_TRUE(got) << got.error().what();
  EXPECT_EQ(got->status, 3);
  EXPECT_EQ(got->text, "out\nerr\n");
  const auto much = capture({"head", "-c", "5000000", "/dev/zero"}, 30s);
  ASSERT_TRUE(much);
  EXPECT_LT(much->text.size(), std::size_t{2} << 20);
}

TEST(CaptureTest, WaitsForNobody) {
  const auto since = std::chrono::steady_clock::now();
  const auto slow = capture({"sleep", "1000"}, 200ms);
  ASSERT_FALSE(slow);
  EXPECT_EQ(slow.error().code(), ErrorCode::Timeout);
  const auto closed = capture({"sh", "-c", "exec >&- 2>&-; sleep 1000"}, 200ms);
  EXPECT_FALSE(closed);
  const auto left = capture({"sh", "-c", "sleep 1000 & echo here"}, 30s);
  ASSERT_TRUE(left) << left.error().what();
  EXPECT_EQ(left->text, "here\n");
  EXPECT_LT(std::chrono::steady_clock::now() - since, 25s);
}

TEST(CaptureTest, SaysWhatIsNotThere) {
  const auto none = capture({"no-such-program-anywhere"}, 1s);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), ErrorCode::Unavailable);
}

net::Secret some_secret() {
  std::array<std::uint8_t, net::Secret::kBytes> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(7 * i + 3);
  return net::Secret::from_bytes(bytes);
}

TEST(Invitation, ComesBackAsItWas) {
  Invitation invitation{
      some_secret(), 12, {{{"10.0.0.1", 4711}, {}}, {{"fd77::1", 4712}, {}}}, std::chrono::seconds(9)};
  const auto again = parse_invitation(to_text(invitation));
  ASSERT_TRUE(again) << again.error().what();
  EXPECT_TRUE(again->secret == invitation.secret);
  EXPECT_EQ(again->host_index, 12);
  EXPECT_EQ(again->host_timeout, std::chrono::seconds(9));
  ASSERT_EQ(again->supervisor.size(), 2U);
  EXPECT_EQ(again->supervisor[0].tcp, invitation.supervisor[0].tcp);
  EXPECT_EQ(again->supervisor[1].tcp, invitation.supervisor[1].tcp);
  EXPECT_TRUE(again->router.empty());
  EXPECT_FALSE(again->routes);
}

TEST(Invitation, NamesARouterOrMakesOne) {
  Invitation invitation{some_secret(), 12, {{{"10.0.0.1", 4711}, {}}}};
  invitation.router = {{{"10.0.0.2", 4712}, {}}, {{"fd77::2", 4712}, {}}};
  const auto child = parse_invitation(to_text(invitation));
  ASSERT_TRUE(child) << child.error().what();
  EXPECT_EQ(child->supervisor.size(), 1U);
  ASSERT_EQ(child->router.size(), 2U);
  EXPECT_EQ(child->router[1].tcp, invitation.router[1].tcp);
  invitation.router.clear();
  invitation.routes = true;
  const auto router = parse_invitation(to_text(invitation));
  ASSERT_TRUE(router) << router.error().what();
  EXPECT_TRUE(router->router.empty());
  EXPECT_TRUE(router->routes);
}

TEST(Invitation, WhatIsNotWholeIsRefusedAndNeverShown) {
  const std::string whole = to_text({some_secret(), 0, {{{"10.0.0.1", 1}, {}}}});
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const auto part = parse_invitation(whole.substr(0, size));
    ASSERT_FALSE(part) << size;
    EXPECT_EQ(std::string(part.error().what()).find("030a"), std::string::npos);
  }
  std::string bad = whole;
  bad[8] = 'x';
  EXPECT_FALSE(parse_invitation(bad));
  EXPECT_FALSE(parse_invitation("host 0\n" + whole));
  EXPECT_FALSE(parse_invitation("what 0\n" + whole));
}

TEST(Announcement, IsFoundBehindWhateverAShellPrinted) {
  const Announcement here = own_announcement();
  const auto found = parse_announcement("welcome to the cluster" + to_line(here) + "\r");
  ASSERT_TRUE(found);
  EXPECT_EQ(*found, here);
  EXPECT_EQ(difference(here, *found), "");
  EXPECT_FALSE(parse_announcement("cohort-agent-is-here"));
  EXPECT_FALSE(parse_announcement("cohort-agent-is-here\tx\t1\t2\t3\t4"));
  EXPECT_FALSE(parse_announcement("bash: cohort: command not found"));
}

// With control characters, a host that has proved nothing could write on the user's screen.
TEST(Announcement, HasNoControlCharacters) {
  Announcement there = own_announcement();
  std::string line = to_line(there);
  const auto at = line.find(there.version);
  line.replace(at, there.version.size(), "\x1b[2J9\xc2\x9b!");
  const auto found = parse_announcement(line);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->version, "[2J9!");
}

TEST(Announcement, DifferencesNameBothSides) {
  Announcement here = own_announcement();
  here.host = "a";
  Announcement there = here;
  there.host = "b";
  there.version = "9.9";
  EXPECT_NE(difference(here, there).find("Cohort is 9.9 on b"), std::string::npos);
  there = here;
  there.protocol += 1;
  EXPECT_NE(difference(here, there).find("protocol"), std::string::npos);
  there = here;
  there.build = "Clang 99, Debug";
  const std::string text = difference(here, there);
  EXPECT_NE(text.find("Clang 99, Debug"), std::string::npos);
  EXPECT_NE(text.find(here.build), std::string::npos);
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

PlannedHost host_of(const std::string& name, int component = -1) {
  PlannedHost host;
  host.name = name;
  host.component = component;
  return host;
}

TEST(RemoteCommand, SshNeverAsksAndTakesTheUsersOwnOptionsFirst) {
  JobSpec spec;
  spec.ssh = {"ssh", "-p", "2222"};
  spec.remote_cohort = "/opt/my cohort/bin/cohort";
  const auto words = remote_command(spec, StartMethod::Ssh, host_of("h2"));
  EXPECT_EQ(words[0] + words[1] + words[2], "ssh-p2222");
  EXPECT_NE(std::find(words.begin(), words.end(), "BatchMode=yes"), words.end());
  EXPECT_EQ(words[words.size() - 3], "--");  // a host is never an option
  EXPECT_EQ(words[words.size() - 2], "h2");
  EXPECT_EQ(words.back(), "exec '/opt/my cohort/bin/cohort' agent --invited");
}

TEST(RemoteCommand, SrunAndMpirunPlaceOneProcessOnTheHost) {
  JobSpec spec;
  spec.remote_cohort = "/c";
  const std::string plain = joined(remote_command(spec, StartMethod::Slurm, host_of("n7")));
  EXPECT_NE(plain.find("--nodelist=n7"), std::string::npos);
  EXPECT_TRUE(plain.ends_with("/c agent --invited"));
  EXPECT_EQ(plain.find("--het-group"), std::string::npos);
  EXPECT_NE(joined(remote_command(spec, StartMethod::Slurm, host_of("n8", 3))).find(" --het-group=3 "),
            std::string::npos);
  EXPECT_EQ(joined(remote_command(spec, StartMethod::Mpi, host_of("n7"))), "mpirun -np 1 -host n7 /c agent --invited");
}

FailedStart failed_ssh(int code, std::string complaints, std::string noise = {}) {
  FailedStart failed;
  failed.host = "h2";
  failed.command = "/opt/cohort";
  failed.status = sys::ExitStatus{code, 0, false};
  failed.complaints = std::move(complaints);
  failed.noise = std::move(noise);
  return failed;
}

void expect(const FailedStart& failed, std::initializer_list<const char*> texts) {
  const std::string why = explain(failed);
  for (const char* text : texts) EXPECT_NE(why.find(text), std::string::npos) << text << " in: " << why;
  EXPECT_EQ(why.find('\n'), std::string::npos);
}

TEST(FailedStart, IsExplainedByWhatWasSaid) {
  expect(failed_ssh(255, "Host key verification failed.\r\n"), {"no agent on h2", "not known here", "`ssh h2` once"});
  expect(failed_ssh(255, "root@h2: Permission denied (publickey).\n"), {"without a password", "ssh-copy-id h2"});
  expect(failed_ssh(255, "something new\n"), {"ssh failed", "something new", "ssh -o BatchMode=yes h2 true"});
  expect(failed_ssh(127, "bash: /opt/cohort: No such file\n"), {"/opt/cohort cannot be started", "--remote-cohort"});
  expect(failed_ssh(0, "", "welcome\n"), {"status 0 before the agent began", ".bashrc", "welcome"});
  FailedStart other_port = failed_ssh(255, "root@h2: Permission denied (publickey).\n");
  other_port.ssh = "ssh -p 2222 -i 'my key'";
  expect(other_port, {"`ssh -p 2222 -i 'my key' -o BatchMode=yes h2 true` has to work"});
  FailedStart waits = failed_ssh(0, "");
  waits.status.reset();
  expect(waits, {"no sign of life", "start-up file", "firewall"});
  waits.announced = true;
  expect(waits, {"the agent began, and has not connected", "firewall"});
  FailedStart step = failed_ssh(1, "srun: error: Unable to create step\n");
  step.method = StartMethod::Slurm;
  expect(step, {"by srun", "Unable to create step"});
}

TEST(FailedStart, ByLuckIsAnMpirunWhoseFolderAnotherOneRemoved) {
  FailedStart failed = failed_ssh(1, "orte_init failed for some reason\n  orte_session_dir failed\n");
  EXPECT_FALSE(is_transient(failed));
  failed.method = StartMethod::Mpi;
  EXPECT_TRUE(is_transient(failed));
  expect(failed, {"mpirun ended (exit code 1)", "orte_session_dir failed", "TMPDIR"});
  failed.announced = true;
  EXPECT_FALSE(is_transient(failed));
  failed.announced = false;
  failed.status.reset();
  EXPECT_FALSE(is_transient(failed));
  failed.status = sys::ExitStatus{1, 0, false};
  failed.complaints = "There are not enough slots available\n";
  EXPECT_FALSE(is_transient(failed));
}

TEST(FailedStart, WhatIsSaidIsCutAndControlCharactersGo) {
  const std::string why = explain(failed_ssh(255, std::string(100'000, 'x') + "\x1b[2Jend\x07"));
  EXPECT_LT(why.size(), 2000U);
  EXPECT_EQ(why.find('\x1b'), std::string::npos);
  EXPECT_NE(why.find("end"), std::string::npos);
}

TEST(HostEnvironment, WhatIsAHostsOwnStaysThere) {
  const Environment travelled({"A=1", "TMPDIR=/insisted", "PATH=/p"});
  const Environment own({"HOME=/there", "TMPDIR=/there", "A=2", "B=3", "SSH_CONNECTION=x", "CUDA_VISIBLE_DEVICES=1"});
  const Environment both = environment_there(travelled, own);
  EXPECT_EQ(both.find("A"), "1");
  EXPECT_EQ(both.find("B"), std::nullopt);
  EXPECT_EQ(both.find("HOME"), "/there");
  EXPECT_EQ(both.find("TMPDIR"), "/insisted");
  EXPECT_EQ(both.find("CUDA_VISIBLE_DEVICES"), "1");
  EXPECT_EQ(both.find("PATH"), "/p");
}

TEST(OneLine, NothingInItCanSteerATerminal) {
  EXPECT_EQ(last_of("a\r\nb\t\tc\n"), "a b c");
  EXPECT_EQ(last_of("\x1b[2Jx\x7f\xc2\x9b"
                    "31my\xc2\xa0z"),
            "[2Jx31my\xc2\xa0z");
  std::string umlauts;
  for (int i = 0; i < 500; ++i) umlauts += "\xc3\xa4";
  const std::string cut = last_of(umlauts);
  EXPECT_LE(cut.size(), 600U);
  EXPECT_TRUE(cut.starts_with("... \xc3\xa4")) << cut.substr(0, 8);
}

std::string chosen(const JobSpec& options, const std::vector<std::string>& environment = {}) {
  const auto shown = [](const std::vector<PlannedHost>& hosts) {
    std::string text;
    for (const PlannedHost& host : hosts)
      text += " " + host.name + ":" + std::to_string(host.slots) + (host.local ? "*" : "");
    return text;
  };
  try {
    const Plan choice = choose_hosts(options, Environment(environment));
    return std::string(start_method_name(choice.method)) + shown(choice.hosts) +
           (options.server_hosts.empty() ? "" : " |" + shown(choice.server_hosts));
  } catch (const Error& error) {
    return error.what();
  }
}

JobSpec list(const std::string& text) {
  JobSpec options;
  options.hosts = text;
  return options;
}

TEST(Hosts, AListNamesHostsAndSlots) {
  EXPECT_EQ(chosen(list("a:4,b,[fd77::9]:2")), "ssh a:4 b:1 fd77::9:2");
  EXPECT_EQ(chosen(list("localhost:2,b:3")), "ssh localhost:2* b:3");
  EXPECT_EQ(chosen(list(sys::host_name() + ":2,b")), "ssh " + sys::host_name() + ":2* b:1");
  EXPECT_EQ(chosen({}), "ssh");
}

TEST(Hosts, NodesAndPerNodeCutTheList) {
  JobSpec options = list("a:4,b:4,c:4");
  options.nodes = 2;
  EXPECT_EQ(chosen(options), "ssh a:4 b:4");
  options.per_node = 3;
  EXPECT_EQ(chosen(options), "ssh a:3 b:3");
  options.nodes = 4;
  EXPECT_EQ(chosen(options), "--nodes 4: there are only 3 hosts");
  JobSpec here;
  here.per_node = 3;
  EXPECT_EQ(chosen(here), "ssh " + sys::host_name() + ":3*");
  here.nodes = 2;
  EXPECT_NE(chosen(here).find("name them with -H"), std::string::npos);
}

TEST(Hosts, WhatCouldBeAnOptionOrTwoWordsIsNoHost) {
  for (const char* bad : {"-oProxyCommand=x", "a b", "a;b", "$(x)", "a:0", "a:x", "", "a,,b"}) {
    EXPECT_TRUE(chosen(list(bad)).starts_with(*bad != '\0' ? "-H " : "ssh")) << bad;
  }
}

TEST(Hosts, ThisHostByTwoNamesHasTheSlotsOfBoth) {
  EXPECT_EQ(chosen(list("localhost:2,b,127.0.0.1:3," + sys::host_name())), "ssh localhost:6* b:1");
  EXPECT_EQ(choose_hosts(list("localhost:2,127.0.0.1:2"), Environment()).note,
            "localhost and 127.0.0.1 are both this host, which has 4 slots");
  EXPECT_EQ(choose_hosts(list("localhost:2,localhost:2"), Environment()).note, "");
  JobSpec options = list("localhost:2,127.0.0.1:2,b");
  options.per_node = 3;
  EXPECT_EQ(chosen(options), "ssh localhost:3* b:3");
}

TEST(Hosts, ThisHostIsKnownByAnyOfItsNames) {
  for (const char* name : {"LOCALHOST", "localhost.", "127.0.0.2", "127.1.2.3", "::1", "a.localhost"})
    EXPECT_TRUE(is_this_host(name)) << name;
  for (const char* name : {"128.0.0.1", "localhost.example.org", "a", "192.0.2.1"})
    EXPECT_FALSE(is_this_host(name)) << name;
  // Collects all names that /etc/hosts has for a loopback address.
  std::ifstream file("/etc/hosts");
  for (std::string line; std::getline(file, line);) {
    std::string address, name;
    std::istringstream(line) >> address >> name;
    if (address == "127.0.0.1" || address == "127.0.1.1") {
      EXPECT_TRUE(is_this_host(name)) << line;
    }
  }
}

TEST(Hosts, AllAreHereIfThatIsWanted) {
  JobSpec options = list("x:1,y:2");
  options.starter = Starter::Local;
  EXPECT_EQ(chosen(options), "ssh x:1* y:2*");
}

TEST(Hosts, AShortNameAndAFullOneAreTheSameHost) {
  EXPECT_TRUE(same_host("a", "a"));
  EXPECT_TRUE(same_host("a", "a.cluster.example"));
  EXPECT_TRUE(same_host("a.cluster.example", "a"));
  EXPECT_FALSE(same_host("a.one", "a.two"));
  EXPECT_FALSE(same_host("a", "b"));
  EXPECT_FALSE(same_host("10", "10.0.0.1"));
  EXPECT_TRUE(is_this_host("localhost"));
  EXPECT_TRUE(is_this_host(sys::host_name()));
  EXPECT_FALSE(is_this_host("192.0.2.1"));
}

const std::vector<std::string> kAllocation = {"SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=n[1-3]",
                                              "SLURM_TASKS_PER_NODE=2(x2),1"};

TEST(Hosts, AnAllocationIsTakenWholeAndBySrun) {
  EXPECT_EQ(chosen({}, kAllocation), "srun n1:2 n2:2 n3:1");
  EXPECT_EQ(chosen(list("n2:9"), kAllocation), "srun n2:9");
  EXPECT_EQ(chosen(list("n2,elsewhere"), kAllocation), "ssh n2:1 elsewhere:1");
  JobSpec by_ssh;
  by_ssh.starter = Starter::Ssh;
  EXPECT_EQ(chosen(by_ssh, kAllocation), "ssh n1:2 n2:2 n3:1");
  EXPECT_EQ(
      choose_hosts(list("localhost:2"), Environment(kAllocation)).note,
      "-H localhost:2 is one of the allocation's 3 nodes, and this job leaves the others idle -- without -H it uses "
      "all");
  EXPECT_EQ(choose_hosts(list("n1:2"), Environment(kAllocation)).note, "");
  EXPECT_EQ(choose_hosts({}, Environment(kAllocation)).note, "");
  JobSpec by_srun;
  by_srun.starter = Starter::Slurm;
  by_srun.hosts = "a,b";
  EXPECT_NE(chosen(by_srun).find("this is no Slurm allocation"), std::string::npos);
}

TEST(Hosts, AHeterogeneousJobHasTheNodesOfAllItsComponents) {
  const auto components_of = [](std::vector<std::string> variables) {
    variables.insert(variables.end(), {"SLURM_JOB_ID=7", "SLURM_HET_SIZE=2"});
    std::map<std::string, int> components;
    for (const PlannedHost& host : choose_hosts({}, Environment(variables)).hosts)
      components[host.name] = host.component;
    return components;
  };
  // Environment of a batch script, which runs in the first component.
  std::vector<std::string> script = {"SLURM_JOB_NODELIST=n1",
                                     "SLURM_TASKS_PER_NODE=1",
                                     "SLURM_JOB_NODELIST_HET_GROUP_0=n1",
                                     "SLURM_TASKS_PER_NODE_HET_GROUP_0=1",
                                     "SLURM_JOB_NODELIST_HET_GROUP_1=n[2-3]",
                                     "SLURM_TASKS_PER_NODE_HET_GROUP_1=4(x2)"};
  EXPECT_EQ(components_of(script), (std::map<std::string, int>{{"n1", 0}, {"n2", 1}, {"n3", 1}}));
  script.insert(script.end(), {"SLURM_JOB_ID=7", "SLURM_HET_SIZE=2"});
  EXPECT_EQ(chosen({}, script), "srun n1:1 n2:4 n3:4");
  EXPECT_EQ(chosen(list("n3:2,n1:2"), script), "srun n3:2 n1:2");
  // Environment of salloc's shell, with a node in both components.
  const std::vector<std::string> shell = {"SLURM_JOB_NODELIST_HET_GROUP_0=n1", "SLURM_TASKS_PER_NODE_HET_GROUP_0=1",
                                          "SLURM_JOB_NODELIST_HET_GROUP_1=n[1-2]",
                                          "SLURM_TASKS_PER_NODE_HET_GROUP_1=2,1"};
  EXPECT_EQ(components_of(shell), (std::map<std::string, int>{{"n1", 0}, {"n2", 1}}));
  // Environment of a process that srun has started.
  EXPECT_EQ(components_of({"SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=1", "SLURM_JOB_NODELIST_PACK_GROUP_0=n1",
                           "SLURM_JOB_NODELIST_PACK_GROUP_1=n2"}),
            (std::map<std::string, int>{{"n1", 0}, {"n2", 1}}));
  EXPECT_NE(
      chosen({}, {"SLURM_JOB_ID=7", "SLURM_HET_SIZE=2", "SLURM_JOB_NODELIST=n1", "SLURM_JOB_NODELIST_HET_GROUP_0=n1"})
          .find("SLURM_HET_SIZE=2, but there is no SLURM_JOB_NODELIST_HET_GROUP_1"),
      std::string::npos);
}

TEST(Hosts, ServersHaveHostsOfTheirOwn) {
  const auto with_servers = [](JobSpec options, const std::string& servers,
                               const std::vector<std::string>& environment = {}) {
    options.server_hosts = servers;
    return chosen(options, environment);
  };
  EXPECT_EQ(with_servers(list("a:4,b:4"), "c:2,b"), "ssh a:4 b:4 | c:2 b:1");
  EXPECT_EQ(with_servers({}, "c"), "ssh | c:1");
  EXPECT_EQ(with_servers({}, "localhost:2"), "ssh | " + sys::host_name() + ":2*");
  EXPECT_EQ(with_servers(list("localhost"), "localhost:2"), "ssh localhost:1* | localhost:2*");
  EXPECT_EQ(with_servers(list("localhost"), sys::host_name()), "ssh localhost:1* | localhost:1*");
  EXPECT_NE(with_servers(list("a"), "-x").find("--server-hosts -x"), std::string::npos);
  EXPECT_NE(with_servers(list("a"), "component 0").find("no heterogeneous job"), std::string::npos);
  // In an allocation, servers get whole nodes.
  const std::vector<std::string> plain = {"SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=n[1-3]", "SLURM_TASKS_PER_NODE=2(x3)"};
  EXPECT_EQ(with_servers({}, "n3", plain), "srun n1:2 n2:2 | n3:1");
  EXPECT_EQ(with_servers({}, "n3,elsewhere", plain), "ssh n1:2 n2:2 | n3:1 elsewhere:1");
  EXPECT_EQ(with_servers(list("n1,n3"), "n3:4", plain), "srun n1:1 n3:1 | n3:4");
  EXPECT_NE(with_servers({}, "n[1-3]", plain).find("--server-hosts"), std::string::npos);
  EXPECT_NE(with_servers({}, "n1,n2,n3", plain).find("none is left for ranks"), std::string::npos);
  const std::vector<std::string> parts = {"SLURM_JOB_ID=7",
                                          "SLURM_HET_SIZE=2",
                                          "SLURM_JOB_NODELIST_HET_GROUP_0=n[1-2]",
                                          "SLURM_TASKS_PER_NODE_HET_GROUP_0=4(x2)",
                                          "SLURM_JOB_NODELIST_HET_GROUP_1=m1",
                                          "SLURM_TASKS_PER_NODE_HET_GROUP_1=2"};
  EXPECT_EQ(with_servers({}, "component 1", parts), "srun n1:4 n2:4 | m1:2");
  EXPECT_NE(with_servers({}, "component 2", parts).find("components 0 to 1"), std::string::npos);
}

TEST(Hosts, ATaskOfAStepIsOnItsOwn) {
  auto task = kAllocation;
  task.insert(task.end(), {"SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=3"});
  EXPECT_EQ(chosen({}, task), "ssh");
  task.back() = "SLURM_STEP_NUM_TASKS=1";
  EXPECT_EQ(chosen({}, task), "srun n1:2 n2:2 n3:1");
}

TEST(Hosts, ASingleNodeIsUsedAsAnyHost) {
  EXPECT_EQ(chosen({}, {"SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=" + sys::host_name(), "SLURM_TASKS_PER_NODE=1"}), "ssh");
}

TEST(Hosts, ASingleNodeRunsAsManyAsItsAllocationWasAskedFor) {
  const int cores = sys::usable_cores(), asked = cores + 3;
  const auto processes = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=" + sys::host_name(),
                             "SLURM_TASKS_PER_NODE=" + std::to_string(asked)});
    return default_processes(Environment(more));
  };
  EXPECT_EQ(default_processes(Environment(std::vector<std::string>{})), cores);
  EXPECT_EQ(processes({}), cores) << "nobody asked";
  EXPECT_EQ(processes({"SLURM_NTASKS=" + std::to_string(asked)}), asked);
  EXPECT_EQ(processes({"SLURM_NTASKS_PER_NODE=" + std::to_string(asked)}), asked);
  EXPECT_EQ(processes({"SLURM_NTASKS=1", "SLURM_STEP_ID=4294967290", "SLURM_STEP_NUM_TASKS=1"}), asked)
      << "salloc's own step";
  EXPECT_EQ(processes({"SLURM_NTASKS=1", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=1"}), cores) << "srun's";
  EXPECT_EQ(default_processes(Environment(std::vector<std::string>{
                "SLURM_JOB_ID=7", "SLURM_NTASKS=3", "SLURM_JOB_NODELIST=elsewhere", "SLURM_TASKS_PER_NODE=3"})),
            cores);
}

TEST(Hosts, AFileIsReadAndItsErrorsNameIt) {
  char folder[] = "/tmp/cohort-hosts-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  JobSpec options;
  options.host_file = std::string(folder) + "/hosts";
  EXPECT_NE(chosen(options).find("No such file"), std::string::npos);
  std::ofstream(options.host_file) << "# two\na slots=2\nb:3\n";
  EXPECT_EQ(chosen(options), "ssh a:2 b:3");
  std::ofstream(options.host_file) << "a slots=many\n";
  EXPECT_NE(chosen(options).find(options.host_file), std::string::npos);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace cohort::launch
