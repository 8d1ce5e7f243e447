#include "meet/offer.h"

#include "meet/exchange.h"
#include "meet/munge.h"
#include "sys/unique_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>

namespace cohort::meet {
namespace {

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << "in: " << (text)

JoinOffer an_offer(std::size_t addresses) {
  JoinOffer offer{net::Secret::generate().value(), {}};
  for (std::size_t i = 0; i < addresses; ++i)
    offer.addresses.push_back({i % 2 == 0 ? "10.0.0.1" : "fd00::7", static_cast<std::uint16_t>(1000 + i)});
  return offer;
}

TEST(JoinOffer, ReadsBackWhatWasWritten) {
  const JoinOffer offer = an_offer(3);
  const auto text = encode(offer, 1000);
  ASSERT_TRUE(text);
  EXPECT_EQ(text->find_first_of(" \n="), std::string::npos) << "PMI takes one word";
  const auto read = decode_offer(*text);
  ASSERT_TRUE(read) << read.error().what();
  EXPECT_TRUE(read->secret == offer.secret);
  EXPECT_EQ(read->addresses, offer.addresses);
}

TEST(JoinOffer, NeedsNoSecretWhereAllHaveOne) {
  JoinOffer offer = an_offer(1);
  offer.secret.reset();
  const auto text = encode(offer, 1000);
  ASSERT_TRUE(text);
  EXPECT_EQ(*text, "1;-;10.0.0.1:1000");
  const auto read = decode_offer(*text);
  ASSERT_TRUE(read) << read.error().what();
  EXPECT_FALSE(read->secret);
  EXPECT_EQ(read->addresses, offer.addresses);
}

TEST(JoinOffer, FitsIntoWhatTheLauncherTakes) {
  const JoinOffer offer = an_offer(60);
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

TEST(JoinOffer, RefusesTheRest) {
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
  cluster::Detected said;
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
  // Another file has that number by now.
  const sys::UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::string number = std::to_string(file.get());
  found = find_exchange(said, {{"PMI_FD", number}, {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
  ASSERT_FALSE(found);
  EXPECT_CONTAINS(found.error().what(), "PMI_FD=" + number + " is not the launcher's socket");
  // Of another rank: an outer launcher's.
  found = find_exchange(said, {{"PMI_FD", "0"}, {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}});
  ASSERT_FALSE(found);
  EXPECT_CONTAINS(found.error().what(), "it set none up");
  said.launcher = "Horovod";
  found = find_exchange(said, {});
  ASSERT_FALSE(found);
  EXPECT_CONTAINS(found.error().what(), "Horovod's own cannot be used");
}

}  // namespace
}  // namespace cohort::meet
