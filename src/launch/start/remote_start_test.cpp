#include "launch/start/remote_start.h"

#include "launch/plan/host_environment.h"
#include "launch/start/invitation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

namespace cohort::launch {
namespace {

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

TEST(RemoteCommand, SshNeverAsksAndTakesTheUsersOwnOptionsFirst) {
  RemoteOptions options;
  options.ssh = {"ssh", "-p", "2222"};
  const auto words = remote_command(options, "h2", "/opt/my cohort/bin/cohort");
  EXPECT_EQ(words[0] + words[1] + words[2], "ssh-p2222");
  EXPECT_NE(std::find(words.begin(), words.end(), "BatchMode=yes"), words.end());
  EXPECT_EQ(words[words.size() - 3], "--");  // a host is never an option
  EXPECT_EQ(words[words.size() - 2], "h2");
  EXPECT_EQ(words.back(), "exec '/opt/my cohort/bin/cohort' agent --invited");
}

TEST(RemoteCommand, SrunAndMpirunPlaceOneProcessOnTheHost) {
  RemoteOptions options;
  options.method = StartMethod::Slurm;
  EXPECT_NE(joined(remote_command(options, "n7", "/c")).find("--nodelist=n7"), std::string::npos);
  EXPECT_TRUE(joined(remote_command(options, "n7", "/c")).ends_with("/c agent --invited"));
  EXPECT_EQ(joined(remote_command(options, "n7", "/c")).find("--het-group"), std::string::npos);
  options.components = {{"n7", 0}, {"n8", 3}};
  EXPECT_NE(joined(remote_command(options, "n8", "/c")).find(" --het-group=3 "), std::string::npos);
  options.components.clear();
  options.method = StartMethod::Mpi;
  EXPECT_EQ(joined(remote_command(options, "n7", "/c")), "mpirun -np 1 -host n7 /c agent --invited");
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
  EXPECT_EQ(one_line("a\r\nb\t\tc\n"), "a b c");
  EXPECT_EQ(one_line("\x1b[2Jx\x7f\xc2\x9b"
                     "31my\xc2\xa0z"),
            "[2Jx31my\xc2\xa0z");
  std::string umlauts;
  for (int i = 0; i < 500; ++i) umlauts += "\xc3\xa4";
  const std::string cut = one_line(umlauts);
  EXPECT_LE(cut.size(), 600U);
  EXPECT_TRUE(cut.starts_with("... \xc3\xa4")) << cut.substr(0, 8);
}

}  // namespace
}  // namespace cohort::launch
