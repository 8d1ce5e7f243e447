// The log of a file store when it was cut, damaged or left behind.
#include "store/file_log.h"

#include "store/file_store.h"

#include <cohort/error.h>

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <iterator>

namespace cohort::store {
namespace {

const FileHeader kHeader{std::string(16, 'n'), "boot", "host", 4711, 1'700'000'000, 2, "meeting"};
const FileRecord kRecord{RecordKind::Set, 1, "key", "value"};

TEST(FileLog, ReadsBackWhatWasWritten) {
  const auto header = decode_header(encode(kHeader) + "more");
  ASSERT_TRUE(header && *header);
  EXPECT_EQ((*header)->bytes, encode(kHeader).size());
  EXPECT_EQ(encode((*header)->value), encode(kHeader));
  const auto record = decode_record(encode(kRecord) + "more");
  ASSERT_TRUE(record && *record);
  EXPECT_EQ((*record)->bytes, encode(kRecord).size());
  EXPECT_EQ((*record)->value.value, "value");
}

TEST(FileLog, WhatWasCutIsNotThereYet) {
  const std::string header = encode(kHeader);
  for (std::size_t size = 0; size < header.size(); ++size) {
    const auto cut = decode_header(std::string_view(header).substr(0, size));
    ASSERT_TRUE(cut) << size << ": " << cut.error().what();
    EXPECT_FALSE(*cut) << size;
  }
  const std::string record = encode(kRecord);
  for (std::size_t size = 0; size < record.size(); ++size) {
    const auto cut = decode_record(std::string_view(record).substr(0, size));
    ASSERT_TRUE(cut) << size << ": " << cut.error().what();
    EXPECT_FALSE(*cut) << size;
  }
}

// Neither for a record nor for one that ends later: what follows a torn record is cut off.
TEST(FileLog, AFlippedBitIsNeverTakenForARecord) {
  const std::string header = encode(kHeader);
  for (std::size_t bit = 0; bit < header.size() * 8; ++bit) {
    std::string damaged = header;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    const auto read = decode_header(damaged);
    EXPECT_FALSE(read) << "bit " << bit;
  }
  const std::string record = encode(kRecord);
  for (std::size_t bit = 0; bit < record.size() * 8; ++bit) {
    std::string damaged = record;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    const auto read = decode_record(damaged);
    EXPECT_FALSE(read) << "bit " << bit;
    if (!read) {
      EXPECT_EQ(read.error().code(), ErrorCode::Corrupt);
    }
  }
}

ErrorCode opening(const std::string& bytes) {
  std::string folder = ::testing::TempDir() + "cohort-log-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return ErrorCode::Internal;
  const std::string path = folder + "/store";
  std::ofstream(path) << bytes;
  ::chmod(path.c_str(), 0600);
  ErrorCode code = ErrorCode::Internal;
  try {
    (void)open_file_store({.path = path, .size = 2, .meeting = "meeting"}, net::deadline_in(std::chrono::seconds(20)));
    ADD_FAILURE() << "opened";
  } catch (const Error& error) {
    code = error.code();
  }
  std::ifstream file(path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), bytes) << "whoever is refused changes nothing";
  ::unlink(path.c_str());
  ::rmdir(folder.c_str());
  return code;
}

TEST(FileStore, RefusesAFileThatWasLeftBehind) {
  const FileRecord member{RecordKind::Member, 0, {}, "rank 0 (pid 4711)"};
  EXPECT_EQ(opening(encode(kHeader)), ErrorCode::Unavailable);
  EXPECT_EQ(opening(encode(kHeader) + encode(member)), ErrorCode::Unavailable);
  // Torn by its writer, who is dead: the rest still says whose it was.
  EXPECT_EQ(opening(encode(kHeader) + encode(member) + encode(kRecord).substr(0, 9)), ErrorCode::Unavailable);
}

TEST(FileStore, RefusesADamagedFile) {
  const std::string header = encode(kHeader);
  EXPECT_EQ(opening(""), ErrorCode::Corrupt);
  EXPECT_EQ(opening(header.substr(0, header.size() - 1)), ErrorCode::Corrupt);
  EXPECT_EQ(opening("something else altogether"), ErrorCode::Corrupt);
  std::string record = encode(kRecord);
  record.back() = static_cast<char>(record.back() ^ 1);
  EXPECT_EQ(opening(header + record), ErrorCode::Corrupt);
}

}  // namespace
}  // namespace cohort::store
