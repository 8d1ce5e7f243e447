// The addresses that are offered, and how COHORT_NETWORK narrows them.
#include "net/interfaces.h"
#include "net/address.h"
#include "net/socket.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::net {
namespace {

std::vector<InterfaceAddress> some_host() {
  const auto v4 = [](const char* name, std::array<std::uint8_t, 16> bytes) {
    InterfaceAddress address;
    address.interface = name;
    address.text = std::to_string(bytes[0]) + "." + std::to_string(bytes[1]) + "." + std::to_string(bytes[2]) + "." +
                   std::to_string(bytes[3]);
    address.bytes = bytes;
    address.loopback = address.interface == "lo";
    return address;
  };
  InterfaceAddress v6 = v4("eth0", {0xfd});
  v6.length = 16;
  v6.text = "fd00::";
  return {v4("lo", {127, 0, 0, 1}), v4("docker0", {172, 17, 0, 1}), v4("eth0", {10, 1, 2, 3}), v6,
          v4("ib0", {192, 168, 7, 9})};
}

std::string chosen(const std::string& networks) {
  const auto filters = parse_networks(networks);
  if (!filters) return filters.error().what();
  const auto addresses = choose(some_host(), *filters);
  if (!addresses) return addresses.error().what();
  std::string text;
  for (const InterfaceAddress& address : *addresses) text += (text.empty() ? "" : " ") + address.text;
  return text;
}

TEST(Networks, OfContainersAndLoopbackComeLast) {
  EXPECT_EQ(chosen(""), "10.1.2.3 fd00:: 192.168.7.9 172.17.0.1 127.0.0.1");
}

TEST(Networks, AreNarrowedByNameAndByBits) {
  EXPECT_EQ(chosen("ib0"), "192.168.7.9");
  EXPECT_EQ(chosen("ib0,eth0"), "192.168.7.9 10.1.2.3 fd00::");
  EXPECT_EQ(chosen("10.0.0.0/8"), "10.1.2.3");
  EXPECT_EQ(chosen("10.0.0.0/16"),
            "COHORT_NETWORK=10.0.0.0/16 fits no address of this host, which has 127.0.0.1 (lo), 172.17.0.1 "
            "(docker0), 10.1.2.3 (eth0), fd00:: (eth0), 192.168.7.9 (ib0) -- correct it");
  EXPECT_EQ(chosen("eth7,,fe80::/10").find("COHORT_NETWORK=eth7,fe80::/10 fits no address"), 0U);
  EXPECT_EQ(chosen("192.168.7.9"), "192.168.7.9");
  EXPECT_EQ(chosen("fc00::/7,10.0.0.0/8"), "fd00:: 10.1.2.3");
  EXPECT_EQ(chosen("0.0.0.0/0,eth0"), "127.0.0.1 172.17.0.1 10.1.2.3 192.168.7.9 fd00::");
}

TEST(Networks, ThatMeanNothingAreRefusedByName) {
  for (const char* const text : {"10.0.0.0/33", "10.0.0.0/-1", "10.0.0/8", "fd00::/129", "a/b", "10.0.0.0/"}) {
    EXPECT_NE(chosen(text).find(std::string("COHORT_NETWORK: '") + text + "'"), std::string::npos) << chosen(text);
  }
  EXPECT_FALSE(parse_networks(std::string("10.0.0.0\0x/8", 12)));
}

TEST(Networks, ThisHostHasLoopback) {
  const auto all = interface_addresses();
  ASSERT_TRUE(all.has_value());
  bool found = false;
  for (const InterfaceAddress& address : *all) found = found || (address.loopback && address.text == "127.0.0.1");
  EXPECT_TRUE(found);
}

TEST(Networks, ThatAreOfferedAreNeitherLoopbackNorLinkLocal) {
  const auto offered = offered_addresses();
  ASSERT_TRUE(offered);
  for (const std::string& address : *offered) {
    EXPECT_FALSE(is_loopback_name(address)) << address;
    EXPECT_FALSE(address.starts_with("fe80:")) << address;
    EXPECT_TRUE(listen_on({{address, 0}, {}})) << address;  // the address is this host's
  }
}

TEST(Networks, TheAddressTowardsAPeerIsOneOfThisHost) {
  EXPECT_EQ(address_towards({"127.0.0.1", 7}), "127.0.0.1");
  EXPECT_EQ(address_towards({"::1", 7}), "::1");
  const auto offered = offered_addresses();
  ASSERT_TRUE(offered);
  for (const std::string& address : *offered) EXPECT_EQ(address_towards({address, 7}), address);
  const auto nowhere = address_towards({"no.such.host.invalid", 7});
  ASSERT_FALSE(nowhere);
  EXPECT_NE(std::string_view(nowhere.error().what()).find("no.such.host.invalid"), std::string_view::npos);
}

}  // namespace
}  // namespace cohort::net
