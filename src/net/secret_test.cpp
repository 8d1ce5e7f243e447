#include "net/secret.h"

#include "net/address.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace cohort::net {
namespace {

struct Folder {
  std::string path;
  Folder() {
    std::string pattern = ::testing::TempDir() + "cohort-secret-XXXXXX";
    path = ::mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

TEST(Secret, TwoAreDifferentAndCopiesAreEqual) {
  const auto a = value_or_throw(Secret::generate());
  const auto b = value_or_throw(Secret::generate());
  EXPECT_FALSE(a == b);
  EXPECT_TRUE(Secret(a) == a);
}

TEST(Secret, TravelsInASealedMemoryFileMoreThanOnce) {
  const auto secret = value_or_throw(Secret::generate());
  const auto file = value_or_throw(secret.to_sealed_memfd());
  ::fcntl(file.get(), F_SETFD, 0);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(value_or_throw(Secret::from_sealed_memfd(file.get())) == secret);
  EXPECT_EQ(::fcntl(file.get(), F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(::pwrite(file.get(), "x", 1, 0), -1);
  EXPECT_EQ(::ftruncate(file.get(), 0), -1);
}

TEST(Secret, RefusesDescriptorsThatAreSomethingElse) {
  EXPECT_FALSE(Secret::from_sealed_memfd(-1));
  EXPECT_FALSE(Secret::from_sealed_memfd(1'000'000));
  const sys::UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(Secret::from_sealed_memfd(null.get()));
  const sys::UniqueFd unsealed(::memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), Secret::kBytes), 0);
  const auto refused = Secret::from_sealed_memfd(unsealed.get());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::Unavailable);
  EXPECT_NE(std::string(refused.error().what()).find("torchrun"), std::string::npos);
}

TEST(Secret, FilesAreWrittenOnceAndReadBack) {
  const Folder folder;
  const std::string path = folder.path + "/secret";
  ASSERT_TRUE(write_new_secret_file(path));
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600U);
  EXPECT_EQ(status.st_size, 65);
  const auto secret = value_or_throw(Secret::from_file(path));
  EXPECT_TRUE(secret == value_or_throw(Secret::from_file(path)));
  const auto again = write_new_secret_file(path);
  ASSERT_FALSE(again);
  EXPECT_TRUE(secret == value_or_throw(Secret::from_file(path)));
}

TEST(Secret, RefusesFilesThatAreOpenToOthersOrDamaged) {
  const Folder folder;
  const std::string path = folder.path + "/secret";
  EXPECT_FALSE(Secret::from_file(path));
  ASSERT_TRUE(write_new_secret_file(path));
  for (const mode_t mode : {0640U, 0604U, 0620U}) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    const auto refused = Secret::from_file(path);
    ASSERT_FALSE(refused);
    EXPECT_NE(std::string(refused.error().what()).find("chmod 600"), std::string::npos);
  }
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  const std::string digits(64, 'a');
  for (const std::string& text :
       {std::string(), digits.substr(1), digits + "a", digits.substr(1) + "g", digits + "\nx"}) {
    std::ofstream(path, std::ios::trunc) << text;
    EXPECT_FALSE(Secret::from_file(path)) << text;
  }
  std::ofstream(path, std::ios::trunc) << digits;
  EXPECT_TRUE(Secret::from_file(path));
  EXPECT_FALSE(Secret::from_file(folder.path));
}

TEST(Secret, IsReadFromAVariable) {
  const std::string digits = std::string(63, '0') + "7";
  ::setenv("TEST_SECRET_OF_JOB", (digits + "\n").c_str(), 1);  // as in a Kubernetes Secret made from a file
  EXPECT_TRUE(value_or_throw(Secret::from_file("env:TEST_SECRET_OF_JOB")) == *Secret::from_digits(digits));
  for (const char* value : {"", "7", "no digits at all"}) {
    ::setenv("TEST_SECRET_OF_JOB", value, 1);
    EXPECT_FALSE(Secret::from_file("env:TEST_SECRET_OF_JOB")) << value;
  }
  ::unsetenv("TEST_SECRET_OF_JOB");
  const auto refused = Secret::from_file("env:TEST_SECRET_OF_JOB");
  ASSERT_FALSE(refused);
  EXPECT_NE(std::string(refused.error().what()).find("TEST_SECRET_OF_JOB is not set"), std::string::npos);
}

TEST(Secret, IsNotShownWhereItStandsForItsName) {
  const std::string digits = std::string(60, 'A') + "0123";
  for (const std::string& given : {"env:" + digits, digits, "env:" + digits.substr(32), "env:no name" + digits,
                                   "env:Z" + digits, "env:" + std::string(), "env:7X" + digits.substr(50)}) {
    const auto refused = Secret::from_file(given);
    ASSERT_FALSE(refused) << given;
    const std::string error = refused.error().what();
    EXPECT_EQ(error.find("AAAA"), std::string::npos) << error;
    EXPECT_EQ(error.find("0123"), std::string::npos) << error;
    EXPECT_NE(error.find("not shown"), std::string::npos) << error;
  }
  const Folder folder;
  ASSERT_EQ(::chdir(folder.path.c_str()), 0);
  EXPECT_FALSE(write_new_secret_file("env:FOO"));
  EXPECT_NE(::access("env:FOO", F_OK), 0);
}

TEST(Address, ReadsWhatItWrites) {
  for (const char* text : {"host:1", "127.0.0.1:65535", "[::1]:0", "[fe80::1%eth0]:29500"}) {
    const auto address = parse_address(text);
    ASSERT_TRUE(address) << text;
    EXPECT_EQ(to_string(*address), text);
  }
  for (const char* text :
       {"", "host", ":1", "host:", "host:x", "host:65536", "host:-1", "::1:1", "[::1]", "[x]:1", "[]:1", "a b:1"}) {
    EXPECT_FALSE(parse_address(text)) << text;
  }
}

TEST(Address, KnowsLoopbackBySpelling) {
  for (const char* host : {"localhost", "127.0.0.1", "127.8.9.10", "::1"}) EXPECT_TRUE(is_loopback_name(host)) << host;
  for (const char* host : {"128.0.0.1", "node1", "::2", "127.0.0.1.example.org"})
    EXPECT_FALSE(is_loopback_name(host)) << host;
}

}  // namespace
}  // namespace cohort::net
