#include "base/env.h"
#include "base/unique_fd.h"
#include "net/interfaces.h"
#include "net/secret.h"
#include "rendezvous/exchange.h"
#include "rendezvous/identity.h"
#include "rendezvous/init_plan.h"
#include "rendezvous/meeting.h"
#include "rendezvous/place.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <stdlib.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

namespace cohort::rendezvous {
namespace {

TEST(InitPlan, WithASecretNobodyElseKnowsTheNameOnThisHost) {
  std::string folder = ::testing::TempDir() + "cohort-plan-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  for (const char* name : {"/one", "/other"}) ASSERT_TRUE(net::write_new_secret_file(folder + name));
  const auto name_with = [&](const std::string& secret, const std::string& init) {
    InitOptions options;
    options.init_method = init;
    options.rank = 0;
    options.world_size = 2;
    if (!secret.empty()) options.secret_file = folder + secret;
    return value_or_throw(plan_init(options, {})).endpoint.unix_name;
  };
  const std::string open = name_with("", "unix://here"), one = name_with("/one", "unix://here");
  EXPECT_EQ(one, name_with("/one", "unix://here"));
  EXPECT_NE(one, name_with("/one", "unix://there"));
  EXPECT_NE(one, open);
  EXPECT_NE(one, name_with("/other", "unix://here"));
  std::filesystem::remove_all(folder);
}

TEST(InitPlan, TrustIsSaidByTheWordsForYesAndNo) {
  const auto plan = [](const std::string& word) {
    InitOptions options;
    options.init_method = "unix://here";
    options.rank = 0;
    options.world_size = 2;
    return plan_init(options, {{"COHORT_TRUST_NETWORK", word}});
  };
  for (const char* yes : {"1", "yes", "TRUE", "on"}) EXPECT_TRUE(value_or_throw(plan(yes)).trusts_network) << yes;
  for (const char* no : {"0", "no", "False", "off", ""}) EXPECT_FALSE(value_or_throw(plan(no)).trusts_network) << no;
  for (const char* bad : {"2", "trusted"}) {
    const auto refused = plan(bad);
    ASSERT_FALSE(refused) << bad;
    EXPECT_EQ(refused.error().code(), ErrorCode::InvalidArgument);
    const std::string why = refused.error().what();
    EXPECT_NE(why.find("COHORT_TRUST_NETWORK='" + std::string(bad) + "'"), std::string::npos) << why;
    EXPECT_NE(why.find("1 (or true, yes, on) or 0 (or false, no, off)"), std::string::npos) << why;
  }
}

TEST(InitPlan, InAPodANameThatIsNotKnownYetIsWaitedFor) {
  ::setenv("TEST_SECRET_OF_JOB", std::string(64, '5').c_str(), 1);
  for (const bool in_a_pod : {false, true}) {
    InitOptions options;
    options.secret_file = "env:TEST_SECRET_OF_JOB";
    options.init_timeout = std::chrono::milliseconds(in_a_pod ? 700 : 60'000);
    Environment environment{
        {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "no-such-host.invalid"}, {"MASTER_PORT", "29500"}};
    if (in_a_pod) environment["KUBERNETES_SERVICE_HOST"] = "10.96.0.1";
    const auto begun = std::chrono::steady_clock::now();
    const InitPlan plan = value_or_throw(plan_init(options, environment));
    EXPECT_EQ(plan.endpoint.tcp.host, "no-such-host.invalid");
    EXPECT_EQ(std::chrono::steady_clock::now() - begun >= options.init_timeout, in_a_pod);
  }
}

TEST(InitPlan, AWordForTimesThatIsNeitherYesNorNoIsRefused) {
  const auto refused = plan_init({}, {{"COHORT_ALONE", "1"}, {"COHORT_TIMES", "often"}});
  ASSERT_FALSE(refused);
  EXPECT_NE(std::string(refused.error().what()).find("COHORT_TIMES='often'"), std::string::npos);
  EXPECT_TRUE(plan_init({}, {{"COHORT_ALONE", "1"}, {"COHORT_TIMES", "yes"}}));
}

/// The exchange of a single rank: what it says comes back.
struct Mirror final : Exchange {
  std::string_view name() const override { return "mirror"; }
  std::size_t longest_value() const override { return 4096; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  Result<std::string> share(const std::string&, const std::optional<std::string>& mine, net::Deadline) override {
    return mine.value();
  }
};

std::string listens_at() {
  InitPlan plan;
  plan.place = InitPlan::Place::Exchange;
  plan.exchange = std::make_shared<Mirror>();
  const auto place = go_to(plan, "world", net::deadline_in(std::chrono::seconds(20)));
  EXPECT_EQ(place->store->add("reached", 1), 1);
  return place->server->endpoint().tcp.host;
}

TEST(InitPlace, TheStoreListensWhereTheNetworkLeavesOneAddress) {
  std::string outer;
  for (const net::InterfaceAddress& each : value_or_throw(net::interface_addresses())) {
    if (!each.loopback) outer = each.text;
  }
  if (outer.empty()) GTEST_SKIP() << "this host has no address but loopback";
  ::setenv(std::string(env::kNetwork).c_str(), outer.c_str(), 1);
  EXPECT_EQ(listens_at(), outer);
  ::unsetenv(std::string(env::kNetwork).c_str());
  EXPECT_NE(listens_at(), outer);
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << "in: " << (text)

InitOffer an_offer(std::size_t addresses) {
  InitOffer offer{net::Secret::generate().value(), {}};
  for (std::size_t i = 0; i < addresses; ++i)
    offer.addresses.push_back({i % 2 == 0 ? "10.0.0.1" : "fd00::7", static_cast<std::uint16_t>(1000 + i)});
  return offer;
}

TEST(InitOffer, ReadsBackWhatWasWritten) {
  const InitOffer offer = an_offer(3);
  const auto text = encode(offer, 1000);
  ASSERT_TRUE(text);
  EXPECT_EQ(text->find_first_of(" \n="), std::string::npos) << "PMI takes one word";
  const auto read = decode_offer(*text);
  ASSERT_TRUE(read) << read.error().what();
  EXPECT_TRUE(read->secret == offer.secret);
  EXPECT_EQ(read->addresses, offer.addresses);
}

TEST(InitOffer, NeedsNoSecretWhereAllHaveOne) {
  InitOffer offer = an_offer(1);
  offer.secret.reset();
  const auto text = encode(offer, 1000);
  ASSERT_TRUE(text);
  EXPECT_EQ(*text, "1;-;10.0.0.1:1000");
  const auto read = decode_offer(*text);
  ASSERT_TRUE(read) << read.error().what();
  EXPECT_FALSE(read->secret);
  EXPECT_EQ(read->addresses, offer.addresses);
}

TEST(InitOffer, FitsIntoWhatTheLauncherTakes) {
  const InitOffer offer = an_offer(60);
  for (const std::size_t longest : {100U, 255U, 1023U}) {
    const auto text = encode(offer, longest);
    ASSERT_TRUE(text);
    EXPECT_LE(text->size(), longest);
    const auto read = decode_offer(*text);
    ASSERT_TRUE(read);
    EXPECT_GE(read->addresses.size(), 1U);
    EXPECT_EQ(read->addresses[0], offer.addresses[0]);
  }
  EXPECT_FALSE(encode(offer, 60));
  EXPECT_FALSE(encode(an_offer(0), 1000));
}

TEST(InitOffer, RefusesTheRest) {
  const std::string secret(64, 'a');
  for (const std::string& text :
       {std::string(), std::string("1"), "2;" + secret + ";a:1", "1;" + secret, "1;" + secret + ";",
        std::string("1;;a:1"), std::string("1;--;a:1"), "1;" + secret + ";a", "1;" + secret + ";a:0",
        "1;" + secret + ";a:1;;b:1", "1;" + secret.substr(1) + ";a:1", "1;" + secret + "a;a:1",
        "1;" + std::string(64, 'g') + ";a:1"}) {
    EXPECT_FALSE(decode_offer(text)) << text;
  }
  std::string many = "1;" + secret;
  for (int i = 0; i < 65; ++i) many += ";a:1";
  EXPECT_FALSE(decode_offer(many));
}

TEST(PmiLine, IsReadByWords) {
  const auto reply = parse_pmi_line("cmd=get_result rc=-1 msg=key_x not found value=a:1=b");
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->at("cmd"), "get_result");
  EXPECT_EQ(reply->at("rc"), "-1");
  EXPECT_EQ(reply->at("value"), "a:1=b");
  for (const char* text : {"", " ", "cmd", "rc=0", "=cmd", "hello world"}) EXPECT_FALSE(parse_pmi_line(text)) << text;
}

TEST(MungeSocket, IsWhatSlurmsConfigurationSays) {
  EXPECT_EQ(munge_socket_of(""), "");
  EXPECT_EQ(munge_socket_of("AuthType=auth/munge\nAuthInfo=socket=/run/m\n"), "/run/m");
  EXPECT_EQ(munge_socket_of("# AuthInfo=socket=/no\n  authinfo = ttl=5,Socket=/run/m,cred_expire=2 # yes"), "/run/m");
  EXPECT_EQ(munge_socket_of("AuthAltInfo=socket=/no\nAuthInfo=cred_expire=2\n"), "");
}

TEST(Exchange, IsOnlyTheLaunchersOwn) {
  rendezvous::Detected said;
  said.launcher = "Open MPI";
  said.rank = 1;
  said.size = 2;
  said.source = "OMPI_COMM_WORLD_RANK=1";
  // PMI of an outer srun is not Open MPI's.
  auto found = find_exchange(said, {{"PMI_FD", "0"}, {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code(), ErrorCode::Unavailable);
  EXPECT_CONTAINS(found.error().what(), "COHORT_INIT");
  said.launcher = "MPI (PMI)";
  // Another file has that descriptor number by now.
  const sys::UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::string number = std::to_string(file.get());
  found = find_exchange(said, {{"PMI_FD", number}, {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
  ASSERT_FALSE(found);
  EXPECT_CONTAINS(found.error().what(), "PMI_FD=" + number + " is not the launcher's socket");
  // The socket belongs to another rank, of an outer launcher.
  found = find_exchange(said, {{"PMI_FD", "0"}, {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}});
  ASSERT_FALSE(found);
  EXPECT_CONTAINS(found.error().what(), "it set none up");
  said.launcher = "Horovod";
  found = find_exchange(said, {});
  ASSERT_FALSE(found);
  EXPECT_CONTAINS(found.error().what(), "Horovod's own cannot be used");
}

// Properties in which ranks may not differ, and the errors they get if they do.

std::vector<MemberInfo> two_infos() {
  std::vector<MemberInfo> infos(2);
  for (int rank = 0; rank < 2; ++rank) {
    MemberInfo& info = infos[static_cast<std::size_t>(rank)];
    info.rank = rank;
    info.size = 2;
    info.pid = 100 + rank;
    info.host = "h";
    info.host_id = "id";
    info.build = this_build();
    info.program = "train (build id 1)";
    info.torch = "2.5.1";
    info.source = "RANK";
    info.backends = {"local"};
  }
  return infos;
}

const std::vector<BackendChoice> kKnown = {{"local", false}};

std::string refusal(const std::vector<MemberInfo>& infos) {
  const auto decision = judge(infos, kKnown);
  if (decision) return "accepted";
  EXPECT_EQ(decision.error().code(), ErrorCode::Mismatch);
  return decision.error().what();
}

void expect_both(const std::string& text, const std::string& first, const std::string& second) {
  EXPECT_NE(text.find("rank 0 (host h, pid 100)"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1 (host h, pid 101)"), std::string::npos) << text;
  EXPECT_NE(text.find(first), std::string::npos) << text;
  EXPECT_NE(text.find(second), std::string::npos) << text;
}

TEST(MemberInfoTest, RanksThatAreAlikeFormAWorld) {
  EXPECT_EQ(refusal(two_infos()), "accepted");
  auto later = two_infos();
  later[0].torch.clear();  // torch may be loaded after the meeting
  EXPECT_EQ(refusal(later), "accepted");
}

TEST(MemberInfoTest, WhoDiffersIsRefusedWithBothSidesValues) {
  auto infos = two_infos();
  infos[1].program = "train (build id 2)";
  expect_both(refusal(infos), "'train (build id 1)'", "'train (build id 2)'");
  infos = two_infos();
  infos[1].torch = "1.13.1";
  expect_both(refusal(infos), "torch 2.5.1", "torch 1.13.1");
  infos = two_infos();
  infos[1].build = "another";
  expect_both(refusal(infos), this_build(), "'another'");
  infos = two_infos();
  infos[1].size = 3;
  expect_both(refusal(infos), "2 ranks", "3");
}

TEST(AgreedWorldTest, TravelsWholeAndIsShortWhereHostsAreAlike) {
  const auto of = [](std::vector<int> hosts) { return AgreedWorld{"hosts", std::move(hosts), ""}; };
  std::vector<int> alike, cyclic;
  for (int rank = 0; rank < 8192; ++rank) {
    alike.push_back(rank / 8);
    cyclic.push_back(rank % 1024);
  }
  EXPECT_LT(encode(of(alike)).size(), 64U);
  EXPECT_LT(encode(of(cyclic)).size(), 256U);
  for (const auto& hosts : {alike, cyclic, {0}, {0, 0, 1, 0, 2, 2, 1, 3}, {0, 1, 1, 2, 2, 3}}) {
    const AgreedWorld read = value_or_throw(decode_agreed_world(encode(of(hosts))));
    EXPECT_EQ(read.hosts, hosts);
    EXPECT_EQ(read.backend, "hosts");
  }
  const AgreedPlace place = of({0, 0, 1, 0, 2, 2, 1, 3}).place_of(6);
  EXPECT_EQ(std::tie(place.local_rank, place.local_size, place.cross_rank, place.cross_size), std::tuple(1, 2, 1, 4));
}

TEST(AgreedWorldTest, PlacementsThatCannotBeAreRefused) {
  const std::string bytes = encode(AgreedWorld{"local", {0, 0, 1, 1, 1}, ""});  // two runs, the last 24 bytes
  const auto with = [&](std::size_t field, std::int32_t value) {
    std::string other = bytes;
    std::memcpy(other.data() + other.size() - 24 + 4 * field, &value, sizeof value);
    return decode_agreed_world(other).has_value();
  };
  EXPECT_TRUE(with(0, 0));
  EXPECT_FALSE(with(0, 1)) << "hosts are numbered in their order";
  EXPECT_FALSE(with(1, 0));
  EXPECT_FALSE(with(2, -1));
  EXPECT_FALSE(with(2, 1 << 30)) << "more ranks than there may be";
  EXPECT_FALSE(with(5, 2)) << "it would be written as one run";
  EXPECT_FALSE(decode_agreed_world(bytes.substr(0, bytes.size() - 12)));
}

TEST(MemberInfoTest, TravelsWhole) {
  const MemberInfo info = two_infos()[1];
  const auto read = decode_member_info(encode(info));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->program, info.program);
  EXPECT_EQ(read->torch, info.torch);
  EXPECT_EQ(read->backends, info.backends);
}

TEST(ProgramIdentityTest, ThisProgramHasAName) {
  EXPECT_TRUE(rendezvous::own_executable().starts_with("rendezvous_tests (")) << rendezvous::own_executable();
  EXPECT_EQ(rendezvous::own_executable(), rendezvous::own_executable());
  EXPECT_EQ(rendezvous::loaded_torch(), "") << "no test of this room links it";
}

}  // namespace
}  // namespace cohort::rendezvous
