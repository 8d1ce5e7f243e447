#include "data.h"

#include <cohort/error.h>
#include <cohort/torch/idx.h>

#include <string>

namespace fs = std::filesystem;

namespace {

constexpr int64_t kSide = 28;

// splitmix64 (S. Vigna, public domain): every bit of the result depends on every bit of the number.
uint64_t mix(uint64_t number) {
  number += 0x9E3779B97F4A7C15;
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EB;
  return number ^ (number >> 31);
}

at::Tensor read(const fs::path& folder, const std::string& name) {
  for (const char* ending : {"", ".gz"}) {
    const fs::path path = folder / (name + ending);
    if (fs::exists(path)) return cohort::data::read_idx(path.string());
  }
  throw cohort::Error(cohort::ErrorCode::Unavailable,
                      "reading the digits failed -- " + (folder / name).string() +
                          " -- neither it nor the same with .gz is there -- tools/get-mnist downloads MNIST; without "
                          "--data the digits that ship with Cohort are used");
}

Digits read_part(const fs::path& folder, const std::string& part) {
  const at::Tensor images = read(folder, part + "-images-idx3-ubyte");
  const at::Tensor labels = read(folder, part + "-labels-idx1-ubyte");
  const auto check = [&](bool good, const std::string& what) {
    if (good) return;
    throw cohort::Error(cohort::ErrorCode::Corrupt, "reading the digits failed -- " + (folder / part).string() +
                                                        "-* -- " + what + " -- are these MNIST's files?");
  };
  check(images.dim() == 3 && images.scalar_type() == at::kByte && images.numel() > 0,
        "the images are no bytes of shape [count, rows, columns]");
  check(labels.dim() == 1 && labels.scalar_type() == at::kByte, "the labels are no list of bytes");
  check(labels.size(0) == images.size(0),
        "there are " + std::to_string(images.size(0)) + " images and " + std::to_string(labels.size(0)) + " labels");
  check(labels.max().item<int64_t>() <= 9, "a label is above 9");

  Digits digits{images.unsqueeze(1).to(at::kFloat).div_(255), labels.to(at::kLong), 0};
  if (images.size(1) != kSide || images.size(2) != kSide) {
    digits.images = at::upsample_bilinear2d(digits.images, {kSide, kSide}, /*align_corners=*/false);
  }
  return digits;
}

}  // namespace

Digits Digits::select(const std::vector<int64_t>& indices) const {
  const at::Tensor numbers = torch::tensor(indices, at::kLong);
  return {images.index_select(0, numbers), labels.index_select(0, numbers), background};
}

Digits Digits::shifted(const std::vector<int64_t>& indices, uint64_t seed, int64_t epoch, int64_t farthest) const {
  Digits moved = select(indices);
  if (farthest == 0) return moved;
  const at::Tensor framed = at::constant_pad_nd(moved.images, {farthest, farthest, farthest, farthest}, background);
  const auto places = static_cast<uint64_t>(2 * farthest + 1);
  const uint64_t key = (seed << 32) + static_cast<uint64_t>(epoch);
  for (size_t i = 0; i < indices.size(); ++i) {
    const uint64_t draw = mix(mix(key) + static_cast<uint64_t>(indices[i]));
    const auto down = static_cast<int64_t>((draw >> 32) % places);
    const auto right = static_cast<int64_t>((draw & 0xFFFFFFFF) % places);
    const auto at = static_cast<int64_t>(i);
    moved.images[at].copy_(framed[at].narrow(1, down, kSide).narrow(2, right, kSide));
  }
  return moved;
}

DigitSets load_digits(const fs::path& folder) {
  DigitSets sets{read_part(folder, "train"), read_part(folder, "t10k")};
  const at::Tensor mean = sets.train.images.mean();
  const at::Tensor deviation = sets.train.images.std();
  for (Digits* digits : {&sets.train, &sets.test}) {
    digits->images.sub_(mean).div_(deviation);
    digits->background = -mean.item<float>() / deviation.item<float>();
  }
  return sets;
}

fs::path shipped_digits() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  const fs::path installed = program.parent_path().parent_path() / "share" / "cohort" / "digits";
  return !error && fs::exists(installed) ? installed : fs::path(DIGITS_SOURCE_FOLDER);
}
